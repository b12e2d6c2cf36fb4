"""Check if the nodes of a cluster can take the pods of the accelerated stages: labels, taints and
devices.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from smtrain.client.backends.kubernetes.cluster_api import ClusterApi, ClusterError
from smtrain.client.backends.kubernetes.pod import INSTANCE_TYPE, devices_of
from smtrain.client.findings import Finding
from smtrain.core.config import JobConfig, Stage
from smtrain.core.config.kubernetes import Kubernetes
from smtrain.stages import stage_named

EFA = "vpc.amazonaws.com/efa"
"""The network interfaces that AWS's EFA device plugin offers."""
_GROWS = "nothing needs to be done if the cluster adds nodes; else "
Node = Mapping[str, Any]


def check_nodes(
    cluster: ClusterApi, config: JobConfig, stages: Sequence[Stage]
) -> Iterator[Finding]:
    """Whether enough nodes offer what the pods take. Clusters that add nodes may have none now, so
    these are warnings.
    """
    if not any(stage_named(stage).on_accelerators for stage in stages):
        return
    try:
        nodes: list[Node] = list(cluster.items("/api/v1/nodes"))
    except ClusterError as error:
        if error.status != 403:
            raise
        yield Finding("nodes", "warning", "the nodes may not be listed, so they were not checked")
        return
    section, instance_type = cluster.section, config.compute.instance_type
    labels = dict(section.node_selector)
    has_types = not section.resources and bool(devices_of(instance_type))
    matching_nodes = [
        node for node in nodes if _has_labels(node, labels, instance_type if has_types else "")
    ]
    if nodes and not matching_nodes:
        required_labels = [f"{key}={value}" for key, value in labels.items()]
        required_labels += [f"{INSTANCE_TYPE}={instance_type}"] if has_types else []
        key = "kubernetes.node_selector" if labels else "compute.instance_type"
        yield _warning(
            f"no node has the labels {', '.join(required_labels)}", f"{_GROWS}correct {key}"
        )
        return
    tolerated_nodes = [node for node in matching_nodes if not _open_taints(node, section)]
    if matching_nodes and not tolerated_nodes:
        taint = _open_taints(matching_nodes[0], section)[0]
        taint_text = f"{taint['key']}={taint.get('value', '')}:{taint['effect']}"
        text = f"no node takes the pods, because of taints such as {taint_text}"
        yield _warning(text, f"give kubernetes.tolerations an entry with the key {taint['key']}")
        return
    yield from _check_devices(tolerated_nodes, section, config)


def _check_devices(
    nodes: Sequence[Node], section: Kubernetes, config: JobConfig
) -> Iterator[Finding]:
    resources = dict(section.resources) or devices_of(config.compute.instance_type)
    devices = {
        key: int(value) for key, value in resources.items() if "/" in key and value.isdigit()
    }
    for name, count in devices.items():
        amounts = [_amount(node, name) for node in nodes]
        pods = sum(amount // count for amount in amounts)
        if pods >= config.compute.instance_count:
            yield Finding("nodes", "ok", f"the nodes offer {sum(amounts)} {name}")
            continue
        text = f"the nodes offer {sum(amounts)} {name}, for {pods} pods of {count}"
        remedy = f"{_GROWS}correct kubernetes.resources"
        if any(amounts) and not pods:
            text += f", as no node has more than {max(amounts)}"
            remedy = f"lower {name} in kubernetes.resources"
        elif any(amounts):
            text += f", and the run takes {config.compute.instance_count}"
        yield _warning(text, remedy)
    offered_interfaces = max((_amount(node, EFA) for node in nodes), default=0)
    if offered_interfaces and EFA not in devices and config.compute.instance_count > 1:
        text = f"each node offers {offered_interfaces} {EFA}, and the pods take none"
        remedy = (
            f"set kubernetes.resources with all devices of a pod, {EFA}: {offered_interfaces} too"
        )
        yield _warning(text, remedy)


def _warning(text: str, remedy: str) -> Finding:
    return Finding("nodes", "warning", text, remedy)


def _has_labels(node: Node, labels: Mapping[str, str], instance_type: str) -> bool:
    node_labels = node["metadata"].get("labels") or {}
    if any(node_labels.get(key) != value for key, value in labels.items()):
        return False
    names = ("", instance_type, instance_type.removeprefix("ml."))
    return not instance_type or node_labels.get(INSTANCE_TYPE) in names[1:]


def _open_taints(node: Node, section: Kubernetes) -> list[dict[str, Any]]:
    """The taints of a node that keep the pods away."""
    return [
        taint
        for taint in (node.get("spec") or {}).get("taints") or ()
        if taint["effect"] != "PreferNoSchedule"
        and not any(
            item.key in (None, taint["key"])
            and item.value in (None, taint.get("value", ""))
            and item.effect in (None, taint["effect"])
            for item in section.tolerations
        )
    ]


def _amount(node: Node, name: str) -> int:
    allocatable = (node.get("status") or {}).get("allocatable") or {}
    value = str(allocatable.get(name, "0"))
    return int(value) if value.isdigit() else 0
