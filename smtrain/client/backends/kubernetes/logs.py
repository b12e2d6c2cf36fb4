"""Read the lines of a job's pods: of a pod that has ended the log that it left in S3, else the log
that the API has.

The API has only the newest file of a rotated log, and no log of a deleted pod. Each line of ours
begins with its time (entrypoints/cluster_host.py), so both sources give the same events.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timezone
from typing import Any

from smtrain.client.backends.description import milliseconds
from smtrain.client.backends.kubernetes.cluster_api import (
    ClusterApi,
    ClusterError,
    ClusterLostError,
)
from smtrain.client.backends.kubernetes.pod import CONTAINER
from smtrain.client.backends.kubernetes.state import has_begun, rank_of
from smtrain.client.backends.sagemaker.backend import SageMakerBackend
from smtrain.core.protocol.uris import split_uri

_NODE_STAMP = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d+)?)(?:Z|[+-]\d\d:\d\d) ?")
"""The time that the API puts before each line."""
_POD_STAMP = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3})Z ")
"""The time that a pod puts before each line."""
_FILE = re.compile(r"(algo-\d+-[0-9a-f-]+)\.log$")
_HOST = re.compile(r"/(algo-\d+)-([0-9a-f-]+)$")


class ClusterLogs:
    """The log of one job. The lines of ended pods stay in memory."""

    def __init__(
        self, cluster: ClusterApi, place: SageMakerBackend, name: str, folder: str
    ) -> None:
        self._cluster, self._place, self._name = cluster, place, name
        self._folder, self._hosts_folder = f"{folder}/logs/", f"{folder}/hosts/"
        self._hosts: dict[str, str] = {}
        """Names of hosts by the UID of their pods, for pods that the cluster gives no rank."""
        self._stored: dict[str, list[dict[str, Any]]] = {}

    def since(self, start: int, pods: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Every event from a time (ms) on, pod by pod; `pods` are those of the cluster."""
        # The list of pods is older than the one of files: a pod that ends in between is in both.
        streams = self._stored_streams()
        for pod in pods:
            if not has_begun(pod) or not (host := self._host(pod)):
                continue
            stream = f"{self._name}/{host}-{str(pod['metadata']['uid'])[:8]}"
            if stream not in streams:
                streams[stream] = list(self._live(pod, stream, start))
        return [event for stream in sorted(streams) for event in streams[stream]]

    def last(self, count: int, pods: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """The last so many events of every host."""
        by_host: dict[str, list[dict[str, Any]]] = {}
        for event in sorted(self.since(0, pods), key=lambda event: int(event["timestamp"])):
            host = str(event["logStreamName"]).rpartition("/")[2].rpartition("-")[0]
            by_host.setdefault(host, []).append(event)
        return [event for events in by_host.values() for event in events[-count:]]

    def _host(self, pod: Mapping[str, Any]) -> str:
        """The name of a pod's host, such as algo-1; empty if it is not known yet."""
        rank, uid = rank_of(pod), str(pod["metadata"]["uid"])[:8]
        if rank is not None:
            return f"algo-{rank + 1}"
        if uid not in self._hosts:
            for item in self._place.listing(self._hosts_folder):
                if match := _HOST.search(str(item["Key"])):
                    self._hosts[match[2]] = match[1]
        return self._hosts.get(uid, "")

    def _stored_streams(self) -> dict[str, list[dict[str, Any]]]:
        """The events of the logs in S3 by stream."""
        streams = {}
        bucket, _ = split_uri(self._folder)
        for item in self._place.listing(self._folder):
            if not (match := _FILE.search(str(item["Key"]))):
                continue
            stream = f"{self._name}/{match[1]}"
            if item["ETag"] not in self._stored:
                text = self._place.read(f"s3://{bucket}/{item['Key']}").decode("utf-8", "replace")
                self._stored[item["ETag"]] = list(
                    _events(text.split("\n")[:-1], stream, 0, of_api=False)
                )
            streams[stream] = self._stored[item["ETag"]]
        return streams

    def _live(self, pod: Mapping[str, Any], stream: str, start: int) -> Iterator[dict[str, Any]]:
        query = {"container": CONTAINER, "timestamps": "true"}
        if start:
            since = datetime.fromtimestamp(start // 1000, timezone.utc)
            query["sinceTime"] = since.strftime("%Y-%m-%dT%H:%M:%SZ")
        name = pod["metadata"]["name"]
        try:
            text = self._cluster.text(self._cluster.core("pods", name, "log"), **query)
        except ClusterLostError:
            raise
        except ClusterError:  # it is gone, or its container has not begun
            return
        yield from _events(text.split("\n"), stream, 0, of_api=True)


def _events(
    lines: Sequence[str], stream: str, began: int, *, of_api: bool
) -> Iterator[dict[str, Any]]:
    """Events of lines; `of_api`: the API has put a time before each, which counts if the pod has
    put none.
    """
    stamp = began
    for line in lines:
        text = line
        if of_api:
            if not (match := _NODE_STAMP.match(line)):
                continue  # behind the last line end
            stamp, text = milliseconds(f"{match[1][:23]}+00:00") or stamp, line[match.end() :]
        if match := _POD_STAMP.match(text):
            stamp, text = milliseconds(f"{match[1]}+00:00"), text[match.end() :]
        yield {
            "logStreamName": stream,
            "timestamp": stamp,
            "ingestionTime": stamp,
            "message": text,
        }
