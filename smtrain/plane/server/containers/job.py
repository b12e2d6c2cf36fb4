"""The image, the network and the S3 proxy that the containers of one job share; the settings of
hosts.
"""

from __future__ import annotations

import contextlib
import ipaddress
import itertools
import json
import os
import resource
import shutil
import tarfile
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from smtrain.core.errors import LocalError
from smtrain.core.facts import instance
from smtrain.core.files import write_atomically
from smtrain.plane import hosts as local_hosts
from smtrain.plane.client import REGION
from smtrain.plane.docker import HOME, JOB, connect, explain_docker_errors, require_usable
from smtrain.plane.files import read_json, set_aside
from smtrain.plane.hosts import RUN_IN, LocalHosts
from smtrain.plane.server.artifacts import resolve_links
from smtrain.plane.server.containers import leftovers
from smtrain.plane.server.containers.s3_proxy import S3Proxy
from smtrain.plane.server.jobs import JobRecord, hosts_of

if TYPE_CHECKING:
    from smtrain.plane.server.executor import Executor

# As on SageMaker's hosts: pinned memory for the network, and stacks for OpenMP.
ULIMITS = {"memlock": -1, "stack": 64 << 20, "nofile": 1 << 16}


class JobContainers:
    """The containers of one attempt. Raises `LocalError` if Docker or the image cannot be used."""

    def __init__(self, executor: Executor, job: JobRecord, settings: LocalHosts) -> None:
        self.executor, self.job, self.wanted = executor, job, settings
        self.home = executor.endpoint.home
        self.client = connect()
        self.image, self.folders = require_usable(self.client, image_of(executor, job.request))
        self.network_name = ""
        self.addresses: dict[str, str] = {}
        """The address of every host, known before any starts, as many scripts end at an unknown
        name.
        """
        self.proxy: S3Proxy | None = None
        self._packed: Path | None = None

    def open(self) -> None:
        """Create the network and, unless the job is isolated, the S3 proxy."""
        is_isolated = self.job.is_isolated
        leftovers.mark_home(self.executor.state)
        # With an address of this machine on an internal network, hosts could reach every server
        # that listens on all addresses of this machine.
        options = {"com.docker.network.bridge.inhibit_ipv4": "true"} if is_isolated else {}
        labels = {HOME: str(self.home), JOB: self.job.name}
        self.network_name = f"smtrain-{self.job.name}-{os.urandom(4).hex()}"
        with explain_docker_errors("making the job's network"):
            gateway, *addresses = make_network(
                self.client,
                self.network_name,
                1 + len(hosts_of(self.job.request)),
                internal=is_isolated,
                options=options,
                labels=labels,
            )
        self.addresses = {
            name: at for (name, _, _), at in zip(hosts_of(self.job.request), addresses, strict=True)
        }
        if not is_isolated:
            self.proxy = S3Proxy(self.executor.app, gateway)
        self._packed = fetch_opt_ml(
            self.client, self.image, labels, self.job.folder / "image-ml.tar"
        )

    def lay(self, ml: Path) -> None:
        """Copy the image's /opt/ml to a host's."""
        if self._packed:
            lay_opt_ml(self._packed, ml)

    def environment(self) -> dict[str, str]:
        """The region and, unless the job is isolated, the endpoint and keys of S3."""
        variables = {"AWS_DEFAULT_REGION": REGION, "AWS_EC2_METADATA_DISABLED": "true"}
        if self.proxy:
            endpoint, host = self.executor.endpoint, self.proxy.host
            variables |= {
                "AWS_ENDPOINT_URL": self.proxy.url,
                "AWS_ACCESS_KEY_ID": endpoint.access_key,
                "AWS_SECRET_ACCESS_KEY": endpoint.secret_key,
                "NO_PROXY": f"127.0.0.1,localhost,{host}",
                "no_proxy": f"127.0.0.1,localhost,{host}",
            }
        return variables

    def limits(self, instance_type: str) -> dict[str, Any]:
        """The limits of one host: memory, cores, shared memory, devices; for an isolated one, no
        DNS.
        """
        ram = memory_of(self.wanted.memory, instance_type)
        config: dict[str, Any] = {
            "ulimits": ulimits(),
            "shm_size": (ram or os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")) // 2,
            "devices": [
                f"{path}:{path}:rwm" for path in sorted(map(str, Path("/dev").glob("neuron[0-9]*")))
            ],
            "gpus": os.path.exists("/dev/nvidiactl"),
            "extra_hosts": self.addresses,
        }
        if ram:
            config |= {"mem_limit": ram, "memswap_limit": ram}
        if cores := cores_of(self.wanted.cpus):
            config["cpu_period"], config["cpu_quota"] = 100_000, int(cores * 100_000)
        if self.job.is_isolated:
            config |= {"dns": ["127.0.0.1"], "cap_drop": ["NET_RAW"]}
        return config

    def remove_host(self, folder: Path) -> None:
        """Remove a host's container, if any; if Docker does not answer, `local clean` removes it
        later.
        """
        try:
            leftovers.remove_host(self.client, folder)
        except Exception as error:
            print(f"warning: the container of {folder} may be left: {error}", flush=True)

    def close(self) -> None:
        """Close the S3 proxy and remove the network; its containers must have ended."""
        if self.proxy:
            self.proxy.close()
            self.proxy = None
        if self._packed:
            self._packed.unlink(missing_ok=True)
            self._packed = None
        try:
            leftovers.remove_job(self.client, self.home, self.job.name)
        except Exception as error:
            print(f"warning: the network of {self.job.name} may be left: {error}", flush=True)


def make_network(client: Any, name: str, count: int, **create_options: Any) -> list[str]:
    """Create a bridge network; return its first addresses, the gateway's first.

    Docker gives fixed addresses only in a range that was requested, and knows best which ranges are
    free: first it creates any network, then one with the same range.
    """
    from docker.errors import APIError
    from docker.types import IPAMConfig, IPAMPool

    for attempt in range(8):
        probe = client.networks.create(name, driver="bridge", **create_options)
        try:
            probe.reload()
            subnet = probe.attrs["IPAM"]["Config"][0]["Subnet"]
        finally:
            probe.remove()
        addresses = [
            str(address)
            for address in itertools.islice(ipaddress.ip_network(subnet).hosts(), count)
        ]
        ipam = IPAMConfig(pool_configs=[IPAMPool(subnet=subnet, gateway=addresses[0])])
        try:
            client.networks.create(name, driver="bridge", ipam=ipam, **create_options)
            return addresses
        except APIError as error:
            # Another program may have taken the range.
            if attempt == 7 or "overlap" not in str(error):
                raise
    raise AssertionError


def ulimits() -> dict[str, int]:
    """The limits of SageMaker's hosts, as far as this machine allows them."""
    limits = {}
    for name, wanted_limit in ULIMITS.items():
        hard_limit = resource.getrlimit(getattr(resource, f"RLIMIT_{name.upper()}"))[1]
        limits[name] = (
            wanted_limit
            if hard_limit == resource.RLIM_INFINITY
            else hard_limit
            if wanted_limit < 0
            else min(wanted_limit, hard_limit)
        )
    return limits


def image_of(executor: Executor, request: dict[str, Any]) -> str:
    """The request's image; the control plane's, if set, for a request without a tag of ours."""
    tag_settings = local_hosts.read(request.get("Tags") or []).run_in
    return str(
        ("" if tag_settings else executor.hosts.image)
        or request["AlgorithmSpecification"]["TrainingImage"]
    )


def container_settings(
    executor: Executor, request: dict[str, Any]
) -> tuple[LocalHosts | None, str]:
    """The container settings of a request, None for the sandbox; and why `auto` chose the
    sandbox.
    """
    tag_settings = local_hosts.read(request.get("Tags") or [])
    run_in = tag_settings.run_in or executor.hosts.run_in or "sandbox"
    hosts = LocalHosts(
        run_in,
        tag_settings.memory or executor.hosts.memory,
        tag_settings.cpus or executor.hosts.cpus,
    )
    if run_in == "sandbox":
        return None, ""
    if run_in == "auto":
        try:
            require_usable(connect(), image_of(executor, request))
        except LocalError as error:
            return None, str(error)
    return hosts, ""


def fault_of(executor: Executor, request: dict[str, Any]) -> str | None:
    """The reason why a request cannot run in containers; None if it can, or runs in the sandbox."""
    try:
        hosts, _ = container_settings(executor, request)
        if hosts:
            client = connect()
            require_usable(client, image_of(executor, request))
            memory_of(hosts.memory, "")
            cores_of(hosts.cpus)
            if request.get("EnableNetworkIsolation") and _is_podman(client):
                return (
                    "EnableNetworkIsolation cannot be honoured by podman, whose networks reach this"
                    " machine: use Docker, or leave out local.run_in"
                )
    except LocalError as error:
        return str(error)
    return None


def _is_podman(client: Any) -> bool:
    with contextlib.suppress(Exception):
        return any(
            "podman" in part.get("Name", "").lower()
            for part in client.version().get("Components") or []
        )
    return False


def memory_of(limit: str, instance_type: str) -> int:
    """Bytes of a host; 0 without a limit. `instance` is no limit for a type of unknown memory."""
    if limit in ("", "instance"):
        return int((instance(instance_type) or {}).get("host_gib", 0) * 2**30) if limit else 0
    import docker.errors
    from docker.utils import parse_bytes

    try:
        size = int(parse_bytes(limit))
    except (docker.errors.DockerException, ValueError):
        size = 0
    if size < 6 << 20:
        raise LocalError(
            f"local.memory is {limit!r}; write bytes as Docker does, 512m or 8g, at least 6m, or"
            " instance"
        )
    return size


def cores_of(cpus: str) -> float:
    """Cores of a host; 0 without a limit."""
    if not cpus:
        return 0.0
    try:
        cores = float(cpus)
    except ValueError:
        cores = 0.0
    if not 0.01 <= cores <= 4096:
        raise LocalError(f"local.cpus is {cpus!r}; write a number of cores, as 2 or 0.5")
    return cores


SERVICE_FOLDERS = ("input", "model", "output", "checkpoints", ".tmp")


def fetch_opt_ml(
    client: Any, image: Any, labels: dict[str, str], archive_path: Path
) -> Path | None:
    """Pack the image's /opt/ml into the file `archive_path`; None if it has none.

    Raises `LocalError` of Docker.
    """
    import docker.errors

    with explain_docker_errors("looking for what the image has below /opt/ml"):
        container_id = client.api.create_container(image.id, ["none"], labels=labels)["Id"]
        try:
            pieces, _ = client.api.get_archive(container_id, "/opt/ml")
            with open(archive_path, "wb") as file:
                for piece in pieces:
                    file.write(piece)
        except docker.errors.NotFound:
            return None
        finally:
            client.api.remove_container(container_id, force=True, v=True)
    return archive_path


def lay_opt_ml(archive_path: Path, ml: Path) -> None:
    """Unpack it in a host's folder, except what the service's own folders hide.

    On SageMaker only some folders of /opt/ml are mounted over the image's; here all of /opt/ml is
    the host's.
    """
    with tarfile.open(archive_path) as archive:
        for member in archive:
            name = PurePosixPath(member.name).relative_to("ml")
            if not name.parts or name.parts[0] in SERVICE_FOLDERS or ".." in name.parts:
                continue
            parent = resolve_links(ml, ml / name.parent)
            to = parent / name.name if parent and parent.is_dir() else None
            if to is None or to.is_symlink():
                continue
            if member.isdir():
                to.mkdir(exist_ok=True)
            elif to.exists():
                continue
            elif member.issym():
                os.symlink(member.linkname, to)
            elif source := archive.extractfile(member):
                with source, open(to, "xb") as file:
                    shutil.copyfileobj(source, file)
                to.chmod(member.mode & 0o777)


FILE = "hosts.json"


def load_settings(state: Path) -> LocalHosts:
    """The settings of hosts that this home keeps over restarts; defaults if they are missing or
    damaged.
    """
    path = state / FILE
    if not os.path.lexists(path):
        return LocalHosts()
    try:
        return checked_settings(read_json(path) or {"damaged": True})
    except (ValueError, TypeError):
        set_aside(path, "is damaged")
        return LocalHosts()


def checked_settings(settings: dict[str, Any]) -> LocalHosts:
    """Check settings from outside. Raises ValueError or TypeError."""
    hosts = LocalHosts(**{key: str(value or "") for key, value in settings.items()})
    if hosts.run_in not in ("", *RUN_IN):
        raise ValueError(f"run_in is {hosts.run_in!r}, not one of {', '.join(RUN_IN)}")
    return hosts


def save_settings(state: Path, hosts: LocalHosts) -> None:
    write_atomically(state / FILE, json.dumps(vars(hosts)), mode=0o600)
