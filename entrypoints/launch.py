"""The container's first process: `python launch.py STAGE` installs missing libraries and becomes
the stage.

Training runs under torchrun, and this process forwards SIGTERM to the training processes: torchrun
itself would kill them after 30 s of the 120 s that SageMaker gives, and end in an error. Standard
library only: no package is there yet.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent
# Folders that the native stack of Neuron keeps compiled graphs in, by the variable that names each.
# It reads them when torch is imported. Source: a public copy of torch-neuronx before its release,
# and users of its betas (2026-04 to 10).
GRAPH_FOLDERS = {
    "TORCH_NEURONX_NEFF_CACHE_DIR": "neff",
    "TORCH_NEURONX_HLO_CACHE_DIR": "hlo",
    "NKI_COMPILE_CACHE_URL": "nki",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
}
OF_THIS_HOST = {"TORCH_NEURONX_NEFF_LOCAL_CACHE_DIR": "neff", "TORCH_NEURONX_DEBUG_DIR": "debug"}
"""Folders that are not copied: their files are also in the copied ones, or of use to this job only.
"""
COPY_SECONDS = 900
HALF_SECONDS = 2.0
STOP_SECONDS = 110  # of the 120 that SageMaker gives after SIGTERM
MASTER_PORT = "7777"  # what the SageMaker toolkits use
IMPORT_TORCH = ("generate", "evaluate")


def stage_requirements(file: Path, stage: str) -> list[str]:
    """The requirements of a pip file for a stage: a comment behind one names its stages; no comment
    means all.
    """
    text = file.read_text("utf-8").replace("\\\n", " ")
    parts = [line.partition("#") for line in text.splitlines()]
    return [
        line.strip()
        for line, _, stages in parts
        if line.strip() and stage in (stages.split() or [stage])
    ]


def missing_requirements(lines: list[str]) -> list[str]:
    """The requirements that the installed packages do not satisfy; for a pinned one, any version
    will do.
    """
    unmet_lines = []
    for line in lines:
        name = re.split(r"[^A-Za-z0-9._-]", line)[0]
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            unmet_lines.append(line)
            continue
        if "--hash" in line:
            continue
        with contextlib.suppress(ImportError):
            from packaging.requirements import Requirement

            if not Requirement(line).specifier.contains(version, prereleases=True):
                unmet_lines.append(line)
    return unmet_lines


def lacking_for_options(ml: Path, stage: str) -> dict[tuple[str, str], list[str]]:
    """Unsatisfied requirements, by the option of the config (`data.filters`) and smtrain's
    extra.
    """
    sys.path.insert(0, str(FOLDER.parent))
    from smtrain.core.protocol.entrypoints import EXTRAS, WORDS, package_needs, requirements

    file = ml / "input/data/config/config.json"
    needs = package_needs(json.loads(file.read_text("utf-8")) if file.is_file() else {}, [stage])
    missing_by_need = {
        need: missing_requirements(requirements(FOLDER / "requirements.txt", WORDS[need]))
        for need in needs
    }
    if has_several_hosts(ml) and list((ml / "input/data/code/wheels").glob("ray-*.whl")):
        missing_by_need.pop("data.machines", None)  # it came with the code
    return {(need, EXTRAS[need]): lines for need, lines in missing_by_need.items() if lines}


def refuse(
    stage: str, missing_lines: list[str], ml: Path, needs: Sequence[tuple[str, str]] = ()
) -> None:
    """End with a sentence about missing packages in output/failure: nothing is installed over a
    network.

    `needs`: the options of the config's data that need them, each with its extra.
    """
    extras = ",".join(["train", *(extra for _, extra in needs)])
    remedy = os.environ.get("SMTRAIN_INSTALL", "").replace(
        "smtrain[train]", f"smtrain[{extras}]"
    ) or (
        f"install smtrain[{extras}] in the environment of the control plane"
        if "SMTRAIN_MASTER_PORT" in os.environ
        else "build it into the image (`smtrain image build`), or choose another (compute.image)"
    )
    reason = " and ".join(need for need, _ in needs) or f"stage {stage}"
    end(
        f"{sys.executable} has no {', '.join(missing_lines)}, which {reason}"
        f" need{'s' * (len(needs) < 2)}; {remedy}",
        ml,
    )


def end(sentence: str, ml: Path) -> None:
    """End the job with a sentence in output/failure, from which SageMaker takes FailureReason."""
    print(sentence, file=sys.stderr, flush=True)
    (ml / "output").mkdir(exist_ok=True)
    (ml / "output/failure").write_text(sentence, "utf-8")
    sys.exit(1)


def verify_neuron(ml: Path) -> None:
    """End the job if this host's Neuron devices, driver or packages cannot run its engine."""
    import neuron_host

    config = json.loads((ml / "input/data/config/config.json").read_text("utf-8"))
    compute, engine = config["compute"], (config.get("train") or {}).get("engine", "native")
    host = neuron_host.inspect_host()
    processes = int(compute["processes_per_instance"])
    if fault := neuron_host.fault(engine, compute.get("instance_type", ""), processes, host):
        end(fault, ml)
    if host.device:
        versions = ", ".join(f"{name} {version}" for name, version in host.packages.items())
        print(f"neuron: driver {host.driver or 'unknown'}, {versions}", flush=True)


def verify_uploads(ml: Path) -> None:
    """End the job if a file has changed since the launch uploaded it."""
    if not (ml / "input/data/config/uploads.json").is_file():
        return
    import uploads

    if damage := uploads.damage(ml, *hosts_of(ml)):
        end(damage, ml)


def libraries(stage: str, ml: Path) -> Path | None:
    """Install missing wheels that came with the code into a folder of the job; None if nothing was
    installed.

    Without an index, with the hashes of wheels.txt, and never into this Python.
    """
    missing_lines = missing_requirements(stage_requirements(FOLDER / "wheels.txt", stage))
    if stage == "prepare" and has_several_hosts(ml):
        missing_lines += missing_requirements(stage_requirements(FOLDER / "wheels-ray.txt", stage))
    if not missing_lines:
        return None
    names = ", ".join(line.split("==")[0] for line in missing_lines)
    wheels, folder = ml / "input/data/code/wheels", ml / "code/libraries"
    reason = "no wheels came with the code"
    if wheels.is_dir():
        lock = ml / "code/wheels.txt"
        lock.write_text("\n".join(missing_lines) + "\n", "utf-8")
        began = time.monotonic()
        process = subprocess.run(
            [
                sys.executable,
                "-m",
                "pip",
                "--isolated",
                "install",
                "-q",
                "--disable-pip-version-check",
                "--no-index",
                f"--find-links={wheels}",
                "--require-hashes",
                "--no-deps",
                f"--target={folder}",
                f"--requirement={lock}",
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        if process.returncode == 0:
            # `smtrain check` reads it (core/protocol/log_lines.py).
            print(f"installed {names} in {time.monotonic() - began:.1f} s", flush=True)
            return folder
        reason = (
            process.stdout.strip() or f"pip ended with status {process.returncode}"
        ).splitlines()[-1]
    print(f"without {names} ({reason}): slower ways are taken instead", flush=True)
    return None


def has_several_hosts(ml: Path) -> bool:
    """Whether the job has several hosts."""
    return len(hosts_of(ml)[0]) > 1


def hosts_of(ml: Path) -> tuple[list[str], str]:
    """The names of the job's hosts, and of this one."""
    file = ml / "input/config/resourceconfig.json"
    if not file.is_file():
        return [""], ""
    resources = json.loads(file.read_text("utf-8"))
    return resources["hosts"], resources["current_host"]


def command(stage: str, ml: Path) -> list[str]:
    """The command to become: the stage's script, under torchrun for training."""
    script = str(FOLDER / f"{stage}.py")
    if stage != "train":
        return [sys.executable, script]
    resources = json.loads((ml / "input/config/resourceconfig.json").read_text("utf-8"))
    config = json.loads((ml / "input/data/config/config.json").read_text("utf-8"))
    hosts, current = resources["hosts"], resources["current_host"]
    processes = config["compute"]["processes_per_instance"]
    for library in ("GLOO", "NCCL"):
        os.environ.setdefault(
            f"{library}_SOCKET_IFNAME", resources.get("network_interface_name", "eth0")
        )
    first = address(hosts[0])
    process_count = processes * (len(hosts) if on_this_machine(first) else 1)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores() // process_count)))
    return [
        sys.executable,
        *torchrun(first, (config.get("train") or {}).get("engine", "native")),
        f"--nnodes={len(hosts)}",
        f"--nproc_per_node={processes}",
        f"--node_rank={hosts.index(current)}",
        f"--master_addr={first}",
        f"--master_port={os.environ.get('SMTRAIN_MASTER_PORT', MASTER_PORT)}",
        script,
    ]


def torchrun(first: str, engine: str) -> list[str]:
    """torchrun as arguments of Python.

    If all hosts are on this machine, no other machine may reach their rendezvous; without an
    accelerator torchrun also forks its ranks.
    """
    if not on_this_machine(first):
        return ["-m", "torch.distributed.run"]
    forks = engine == "native" and sys.platform == "linux" and not accelerator()
    return [str(FOLDER / ("forking.py" if forks else "rendezvous.py"))]


def cores() -> int:
    """Processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def on_this_machine(first: str) -> bool:
    """Whether all hosts of the job are on this machine, and share its cores."""
    try:
        return socket.gethostbyname(first).startswith("127.")
    except OSError:
        return False


def accelerator(devices: Path = Path("/dev")) -> bool:
    """Whether this machine has a device whose driver does not survive a fork."""
    names = ("nvidiactl", "kfd", "dxg", "neuron0")
    return any((devices / name).exists() for name in names)


def graph_folder(ml: Path) -> Path | None:
    """Set the folders of compiled graphs, on this host's disk or in its warm pool, and return the
    one that holds them.

    None if the request asks for no cache. What compute.environment names wins.
    """
    from smtrain.core.protocol.entrypoints import GRAPHS, GRAPHS_FOLDER

    pool_folder = os.environ.get(GRAPHS_FOLDER)
    if not pool_folder and GRAPHS not in os.environ:
        return None
    if "SMTRAIN_WARM" in os.environ and not accelerator():  # a local job on CPUs compiles nothing
        return None
    if pool_folder:
        folder = ml / pool_folder.removeprefix("/opt/ml/")
    else:
        # /tmp is on the volume or the NVMe disks of a host of SageMaker; /opt/ml itself may be on
        # its root disk.
        folder = Path("/tmp/smtrain-graphs") if ml == Path("/opt/ml") else ml / "graphs"  # noqa: S108
    for variable, name in GRAPH_FOLDERS.items():
        os.environ.setdefault(variable, str(folder / name))
        (folder / name).mkdir(parents=True, exist_ok=True)
    host_folder = folder.with_name(f"{folder.name}-of-host")
    for variable, name in OF_THIS_HOST.items():
        os.environ.setdefault(variable, str(host_folder / name))
    return folder


def copy_graphs(action: str, folder: Path, seconds: float, *extra_arguments: str) -> None:
    """Copy compiled graphs from (`fetch`) or to (`store`) the place that keeps them between jobs;
    never fails.
    """
    from smtrain.core.protocol.entrypoints import GRAPHS

    if GRAPHS not in os.environ:  # a warm pool without a network
        return
    try:
        subprocess.run(
            [
                sys.executable,
                str(FOLDER / "compile_cache.py"),
                action,
                str(folder),
                *extra_arguments,
            ],
            timeout=max(1.0, seconds),
        )
    except subprocess.TimeoutExpired:
        print(
            f"graphs: {action} was ended after {seconds:.0f} s; the rest is compiled again",
            flush=True,
        )


def supervise(arguments: list[str], stop_times: list[float] | None = None) -> int:
    """Run torchrun; returns its exit status, or 128 + the signal that killed it.

    SIGTERM goes to the training processes, which save and exit by themselves; before they exist, to
    torchrun. Its time is added to `stop_times`.
    """
    process: Any = None

    def stop(_number: int, _frame: object) -> None:
        if stop_times is not None:
            stop_times.append(time.monotonic())
        if process is None:
            sys.exit(128 + signal.SIGTERM)
        for pid in children(process.pid) or [process.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)

    signal.signal(signal.SIGTERM, stop)
    forks = arguments[1] == str(FOLDER / "forking.py")
    process = (copy(arguments, must=True) if forks else None) or subprocess.Popen(arguments)
    status: int = process.wait()
    return status if status >= 0 else 128 - status


def train(arguments: list[str], ml: Path) -> int:
    """Train between a copy of compiled graphs to this host and one of new graphs from it; returns
    the exit status.
    """
    sys.path.insert(0, str(FOLDER.parent))
    folder, stop_times = graph_folder(ml), list[float]()
    if folder:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
        copy_graphs("fetch", folder, COPY_SECONDS)
    status = supervise(arguments, stop_times)
    if folder:
        remaining_s = (
            STOP_SECONDS - (time.monotonic() - stop_times[0]) if stop_times else COPY_SECONDS
        )
        # A process that was killed may have left half a file.
        newest_mtime = time.time() - HALF_SECONDS if status or stop_times else float("inf")
        copy_graphs("store", folder, remaining_s, str(newest_mtime))
    return status


def copy(arguments: list[str], must: bool) -> Any:
    """Start the script in a fork of a warm Python; None if the sandbox has none."""
    if "SMTRAIN_WARM" not in os.environ or accelerator():
        return None
    import warm

    return warm.start(arguments, must)


def attend(process: Any) -> int:
    """Wait for a stage that runs in a fork, and forward SIGTERM; returns its exit status."""
    signal.signal(signal.SIGTERM, lambda *_: os.kill(process.pid, signal.SIGTERM))
    status: int = process.wait()
    return status if status >= 0 else 128 - status


def children(parent: int) -> list[int]:
    """The live child processes of a process."""
    pids = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                # The command in parentheses may hold anything; state and parent come after it.
                if int((entry / "stat").read_text().rpartition(")")[2].split()[1]) == parent:
                    pids.append(int(entry.name))
    return pids


def address(host: str) -> str:
    """The address of the first host: $SMTRAIN_MASTER_ADDR, its name, or this machine in a sandbox
    without names.
    """
    if master_address := os.environ.get("SMTRAIN_MASTER_ADDR"):
        return master_address
    try:
        socket.gethostbyname(host)
    except OSError:
        return "127.0.0.1" if "SMTRAIN_ML_ROOT" in os.environ else host
    return host


def main() -> None:
    """Check and install libraries, then become the stage."""
    stage = sys.argv[1]
    ml = Path(os.environ.get("SMTRAIN_ML_ROOT", "/opt/ml"))
    if missing_lines := missing_requirements(
        stage_requirements(FOLDER / "requirements.txt", stage)
    ):
        refuse(stage, missing_lines, ml)
    if needs := lacking_for_options(ml, stage):
        refuse(stage, [line for lines in needs.values() for line in lines], ml, list(needs))
    verify_uploads(ml)
    if stage == "train":
        verify_neuron(ml)
    paths = [str(FOLDER.parent), str(libraries(stage, ml) or ""), os.environ.get("PYTHONPATH")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_DISABLE", "1")  # progress bars are noise in a log
    arguments = command(stage, ml)
    if stage == "train":
        sys.exit(train(arguments, ml))
    if process := copy(arguments, must=stage in IMPORT_TORCH):
        sys.exit(attend(process))
    os.execv(arguments[0], arguments)  # noqa: S606


if __name__ == "__main__":
    main()
