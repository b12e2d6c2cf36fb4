"""What the containers of one job share: the image, a network of the job's own, and the way to S3."""

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
from smtrain.plane.docker import HOME, JOB, connect, plainly, usable
from smtrain.plane.files import read_json, set_aside
from smtrain.plane.hosts import RUN_IN, LocalHosts
from smtrain.plane.server.artifacts import resolved
from smtrain.plane.server.containers import leftovers
from smtrain.plane.server.containers.s3_proxy import Door
from smtrain.plane.server.jobs import JobRecord, hosts_of

if TYPE_CHECKING:
    from smtrain.plane.server.executor import Executor

# As SageMaker's hosts: pinned memory for the network, and stacks that OpenMP fills.
ULIMITS = {"memlock": -1, "stack": 64 << 20, "nofile": 1 << 16}


class JobContainers:
    """Opened for one attempt at a job. Raises `LocalError` where Docker or the image does not serve."""

    def __init__(self, executor: Executor, job: JobRecord, wanted: LocalHosts) -> None:
        self.executor, self.job, self.wanted = executor, job, wanted
        self.home = executor.endpoint.home
        self.client = connect()
        self.image, self.folders = usable(self.client, image_of(executor, job.request))
        self.network_name = ""
        self.addresses: dict[str, str] = {}
        """Of every host, known before any runs: a name that cannot be resolved yet ends many a script."""
        self.door: Door | None = None
        self._packed: Path | None = None

    def open(self) -> None:
        """Make the network and, where the job has one, the way to S3."""
        isolated = self.job.isolated
        leftovers.mark(self.executor.state)
        # Without an address of this machine on it, an internal network leads nowhere: with one, whatever listens on all
        # addresses of this machine would be within reach.
        options = {"com.docker.network.bridge.inhibit_ipv4": "true"} if isolated else {}
        labels = {HOME: str(self.home), JOB: self.job.name}
        self.network_name = f"smtrain-{self.job.name}-{os.urandom(4).hex()}"
        with plainly("making the job's network"):
            gateway, *addresses = make_network(
                self.client, self.network_name, 1 + len(hosts_of(self.job.request)),
                internal=isolated, options=options, labels=labels,
            )  # fmt: skip
        self.addresses = {name: at for (name, _, _), at in zip(hosts_of(self.job.request), addresses, strict=True)}
        if not isolated:
            self.door = Door(self.executor.app, gateway)
        self._packed = fetch_opt_ml(self.client, self.image, labels, self.job.folder / "image-ml.tar")

    def lay(self, ml: Path) -> None:
        """Put what the image has below /opt/ml into a host's."""
        if self._packed:
            lay_opt_ml(self._packed, ml)

    def environment(self) -> dict[str, str]:
        """Region, and how to reach and sign for S3 where the job has a network."""
        found = {"AWS_DEFAULT_REGION": REGION, "AWS_EC2_METADATA_DISABLED": "true"}
        if self.door:
            endpoint, host = self.executor.endpoint, self.door.host
            found |= {
                "AWS_ENDPOINT_URL": self.door.url,
                "AWS_ACCESS_KEY_ID": endpoint.access_key,
                "AWS_SECRET_ACCESS_KEY": endpoint.secret_key,
                "NO_PROXY": f"127.0.0.1,localhost,{host}",
                "no_proxy": f"127.0.0.1,localhost,{host}",
            }
        return found

    def limits(self, instance_type: str) -> dict[str, Any]:
        """Of one host: memory, cores, shared memory, devices, and no names from outside for an isolated one."""
        ram = memory_of(self.wanted.memory, instance_type)
        found: dict[str, Any] = {
            "ulimits": ulimits(),
            "shm_size": (ram or os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")) // 2,
            "devices": [f"{path}:{path}:rwm" for path in sorted(map(str, Path("/dev").glob("neuron[0-9]*")))],
            "gpus": os.path.exists("/dev/nvidiactl"),
            "extra_hosts": self.addresses,
        }
        if ram:
            found |= {"mem_limit": ram, "memswap_limit": ram}
        if cores := cores_of(self.wanted.cpus):
            found["cpu_period"], found["cpu_quota"] = 100_000, int(cores * 100_000)
        if self.job.isolated:
            found |= {"dns": ["127.0.0.1"], "cap_drop": ["NET_RAW"]}
        return found

    def remove_host(self, folder: Path) -> None:
        """Remove a host's container if it is still there; a daemon that does not answer is left to `local clean`."""
        try:
            leftovers.remove_host(self.client, folder)
        except Exception as error:
            print(f"warning: the container of {folder} may be left: {error}", flush=True)

    def close(self) -> None:
        """Give up the way to S3 and the network; no container may be on it any more."""
        if self.door:
            self.door.close()
            self.door = None
        if self._packed:
            self._packed.unlink(missing_ok=True)
            self._packed = None
        try:
            leftovers.remove_job(self.client, self.home, self.job.name)
        except Exception as error:
            print(f"warning: the network of {self.job.name} may be left: {error}", flush=True)


def make_network(client: Any, name: str, count: int, **more: Any) -> list[str]:
    """Make a bridge network; gives its first addresses, of which the first is its gateway.

    Docker gives fixed addresses only in a range that was asked for, and knows best which are free: it is asked for any
    network first, and for one with the same range then.
    """
    from docker.errors import APIError
    from docker.types import IPAMConfig, IPAMPool

    for attempt in range(8):
        probe = client.networks.create(name, driver="bridge", **more)
        try:
            probe.reload()
            subnet = probe.attrs["IPAM"]["Config"][0]["Subnet"]
        finally:
            probe.remove()
        addresses = [str(address) for address in itertools.islice(ipaddress.ip_network(subnet).hosts(), count)]
        ipam = IPAMConfig(pool_configs=[IPAMPool(subnet=subnet, gateway=addresses[0])])
        try:
            client.networks.create(name, driver="bridge", ipam=ipam, **more)
            return addresses
        except APIError as error:
            # Another program may have taken the range meanwhile.
            if attempt == 7 or "overlap" not in str(error):
                raise
    raise AssertionError


def ulimits() -> dict[str, int]:
    """What SageMaker's hosts allow, as far as this machine allows it to us: a daemon may not raise more."""
    found = {}
    for name, wanted in ULIMITS.items():
        most = resource.getrlimit(getattr(resource, f"RLIMIT_{name.upper()}"))[1]
        found[name] = wanted if most == resource.RLIM_INFINITY else most if wanted < 0 else min(wanted, most)
    return found


def image_of(executor: Executor, request: dict[str, Any]) -> str:
    """The request's image, or the control plane's for requests that do not know of it."""
    told = local_hosts.read(request.get("Tags") or []).run_in
    return str(("" if told else executor.hosts.image) or request["AlgorithmSpecification"]["TrainingImage"])


def wanted(executor: Executor, request: dict[str, Any]) -> tuple[LocalHosts | None, str]:
    """How the containers of a request are made, None for the sandbox; and why `auto` took the sandbox."""
    asked = local_hosts.read(request.get("Tags") or [])
    run_in = asked.run_in or executor.hosts.run_in or "sandbox"
    hosts = LocalHosts(run_in, asked.memory or executor.hosts.memory, asked.cpus or executor.hosts.cpus)
    if run_in == "sandbox":
        return None, ""
    if run_in == "auto":
        try:
            usable(connect(), image_of(executor, request))
        except LocalError as error:
            return None, str(error)
    return hosts, ""


def fault_of(executor: Executor, request: dict[str, Any]) -> str | None:
    """Why a request cannot run in containers; None where it can, or is to run in the sandbox."""
    try:
        hosts, _ = wanted(executor, request)
        if hosts:
            client = connect()
            usable(client, image_of(executor, request))
            memory_of(hosts.memory, "")
            cores_of(hosts.cpus)
            if request.get("EnableNetworkIsolation") and _is_podman(client):
                return (
                    "EnableNetworkIsolation cannot be honoured by podman, whose networks reach this machine: use "
                    "Docker, or leave out local.run_in"
                )
    except LocalError as error:
        return str(error)
    return None


def _is_podman(client: Any) -> bool:
    with contextlib.suppress(Exception):
        return any("podman" in part.get("Name", "").lower() for part in client.version().get("Components") or [])
    return False


def memory_of(asked: str, instance_type: str) -> int:
    """Bytes of a host; 0 without a limit. `instance` is no limit for a type whose memory is not known."""
    if asked in ("", "instance"):
        return int((instance(instance_type) or {}).get("host_gib", 0) * 2**30) if asked else 0
    import docker.errors
    from docker.utils import parse_bytes

    try:
        found = int(parse_bytes(asked))
    except (docker.errors.DockerException, ValueError):
        found = 0
    if found < 6 << 20:
        raise LocalError(f"local.memory is {asked!r}; write bytes as Docker does, 512m or 8g, at least 6m, or instance")
    return found


def cores_of(asked: str) -> float:
    """Cores of a host; 0 without a limit."""
    if not asked:
        return 0.0
    try:
        found = float(asked)
    except ValueError:
        found = 0.0
    if not 0.01 <= found <= 4096:
        raise LocalError(f"local.cpus is {asked!r}; write a number of cores, as 2 or 0.5")
    return found


MOUNTED = ("input", "model", "output", "checkpoints", ".tmp")


def fetch_opt_ml(client: Any, image: Any, labels: dict[str, str], packed: Path) -> Path | None:
    """Pack the image's /opt/ml into the file `packed`; None where the image has none.

    Raises `LocalError` where Docker refuses.
    """
    import docker.errors

    with plainly("looking for what the image has below /opt/ml"):
        made = client.api.create_container(image.id, ["none"], labels=labels)["Id"]
        try:
            pieces, _ = client.api.get_archive(made, "/opt/ml")
            with open(packed, "wb") as file:
                for piece in pieces:
                    file.write(piece)
        except docker.errors.NotFound:
            return None
        finally:
            client.api.remove_container(made, force=True, v=True)
    return packed


def lay_opt_ml(packed: Path, ml: Path) -> None:
    """Put it into a host's folder: files, folders and links, but for what the service's own folders hide."""
    with tarfile.open(packed) as archive:
        for member in archive:
            name = PurePosixPath(member.name).relative_to("ml")
            if not name.parts or name.parts[0] in MOUNTED or ".." in name.parts:
                continue
            parent = resolved(ml, ml / name.parent)
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
    """The settings of this home; the defaults where there are none, or none that make sense."""
    path = state / FILE
    if not os.path.lexists(path):
        return LocalHosts()
    try:
        return checked_settings(read_json(path) or {"damaged": True})
    except (ValueError, TypeError):
        set_aside(path, "is damaged")
        return LocalHosts()


def checked_settings(asked: dict[str, Any]) -> LocalHosts:
    """Settings from the outside. Raises ValueError or TypeError for what is none."""
    hosts = LocalHosts(**{key: str(value or "") for key, value in asked.items()})
    if hosts.run_in not in ("", *RUN_IN):
        raise ValueError(f"run_in is {hosts.run_in!r}, not one of {', '.join(RUN_IN)}")
    return hosts


def save_settings(state: Path, hosts: LocalHosts) -> None:
    write_atomically(state / FILE, json.dumps(vars(hosts)), mode=0o600)
