"""`smtrain doctor --train`: run each part in a separate process, so that a crash or a hang ends
one part only.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from smtrain.core.files import parse_json
from smtrain.core.machine import cores_here
from smtrain.core.spinner import spinner
from smtrain.tools.doctor.devices import TorchView
from smtrain.tools.doctor.doctor_report import anonymise, child_command, kill_session
from smtrain.tools.doctor.sizes import large_model
from smtrain.tools.doctor.task import SizedModel, State, Task, scale_batch, small_model

MINUTES = 10.0
"""Most time, unless --minutes says another."""
MIN_PROCESS_SECONDS = 4.0
"""Seconds below which no other process is begun: one imports torch and transformers first."""
PATIENCE = 30.0
"""Seconds that a part needs at most, unless it hangs, on a slow machine."""
SHARE, _SHARES = 0.5, {"compile": 0.2}
"""The part of the whole time that one part may take."""
_MEASUREMENT_DIVISOR = 30  # a measurement of speed takes this part of the whole time
_LONGEST, _LOG_CHARACTERS = 300, 4000  # characters of a reason, and of a log
_TIME_IS_UP, _MORE_MINUTES = "the time is up", "give more with --minutes"
_NEEDS = {"resume": "fp32", "export": "fp32"}
# What torchrun tells its processes; doctor may itself run under it.
_TORCHRUN = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "ROLE_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
)
CPU, ONE_DEVICE, ALL_DEVICES = "cpu", "one device", "all devices"
"""Groups: one process on the CPU, one on a device, one on each device."""


@dataclass
class Outcome:
    """The end of one part."""

    group: str
    part: str
    device: str
    processes: int
    state: State
    seconds: float = 0.0
    reason: str = ""
    """The reason that it is not done."""
    log: str = ""
    """The end of its processes' output, if it failed."""
    result: dict[str, Any] = field(default_factory=dict)


@dataclass
class Trials:
    """All outcomes, and the models that were trained."""

    kind: str
    count: int
    small: SizedModel
    large: SizedModel
    precision: str
    """Precision of the large model."""
    notes: list[str]
    outcomes: list[Outcome] = field(default_factory=list)

    @property
    def first(self) -> str:
        """The group of one process on the best device."""
        return CPU if self.kind == "cpu" else ONE_DEVICE

    @property
    def on_all(self) -> SizedModel:
        """The large model with the batch of all devices."""
        return scale_batch(self.large, self.count)

    def of(self, group: str, part: str) -> Outcome | None:
        """The outcome of a part; None if it was not planned."""
        return next(
            (
                outcome
                for outcome in self.outcomes
                if (outcome.group, outcome.part) == (group, part)
            ),
            None,
        )

    def result_of(self, group: str, part: str) -> dict[str, Any] | None:
        """The result of a part; None if it is not done."""
        outcome = self.of(group, part)
        return outcome.result if outcome is not None and outcome.state == "done" else None

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def train(
    view: TorchView, minutes: float, model_config: dict[str, Any] | None, say: Callable[[str], None]
) -> Trials:
    """Train small models on the devices that torch sees, for `minutes` at most."""
    cores = cores_here()
    count = (
        view.count if view.kind != "cpu" else 2
    )  # two processes of the CPU stand for two devices
    meshes = [(2, count // 2), (1, count)] if count % 2 == 0 else [(1, count)]
    small, note = small_model(model_config, [count])
    meshes = [mesh for mesh in meshes if not list(small.shape.mesh_faults(mesh[0], 1))]
    large, large_note = large_model(model_config, view, cores, count)
    trials = Trials(
        view.kind,
        count,
        small,
        large,
        "fp32" if view.kind == "cpu" else "bf16",
        [*filter(None, (note, large_note))],
    )
    with tempfile.TemporaryDirectory(
        prefix="smtrain-doctor-", ignore_cleanup_errors=True
    ) as folder:
        runner = _Runner(trials, folder, minutes * 60, say)
        for task in _tasks(trials, folder, minutes * 60, tuple(meshes)):
            runner.run(task)
    return trials


def _tasks(
    trials: Trials, folder: str, seconds: float, meshes: tuple[tuple[int, int], ...]
) -> Iterator[Task]:
    """The groups of processes, in their order: what compares with the CPU first, what takes longest
    last.
    """
    kind, count = trials.kind, trials.count
    task = Task(
        CPU,
        "cpu",
        1,
        ("transformers", "fp32"),
        folder,
        trials.small,
        trials.large,
        trials.precision,
        seconds / _MEASUREMENT_DIVISOR,
        os.getpid(),
        CPU,
        kind == "cpu",
    )
    yield task
    on_device = replace(task, group=trials.first, device=kind, checkpoints=trials.first)
    if kind != "cpu":
        yield replace(on_device, parts=("fp32",), killed=True)
    half = ("bf16", "fp16") if kind == "cuda" else ("bf16",)
    pairs = (
        ("settings",) if kind == "cuda" else ()
    )  # CPUs are deterministic anyway, and compile for minutes
    parts = ("resume", "export", "speed", "plain_speed", *pairs, *half, "compile")
    yield replace(on_device, parts=parts, killed=False)
    if count > 1:
        on_all_devices = replace(
            on_device,
            group=ALL_DEVICES,
            checkpoints=ALL_DEVICES,
            processes=count,
            meshes=meshes,
            large=trials.on_all,
        )
        yield replace(on_all_devices, parts=("fp32",), killed=True)
        yield replace(on_all_devices, parts=("resume", "speed"), killed=False)


class _Runner:
    """Runs tasks, and begins a new process for the parts that come after one that failed."""

    def __init__(
        self, trials: Trials, folder: str, seconds: float, say: Callable[[str], None]
    ) -> None:
        self._trained, self._folder, self._say = trials, Path(folder), say
        self._seconds, self._until = seconds, time.monotonic() + seconds

    def run(self, task: Task) -> None:
        """Do the task's parts; each has an outcome in the end."""
        remaining_parts = list(task.parts)
        for part in task.parts:
            required_part = _NEEDS.get(part)
            if required_part and self._trained.result_of(task.group, required_part) is None:
                self._record_outcome(
                    task,
                    part,
                    "skipped",
                    reason=f"it needs the checkpoint of {required_part}, which is not done",
                )
                remaining_parts.remove(part)
        while remaining_parts:
            if self._seconds_left() < MIN_PROCESS_SECONDS:
                for part in remaining_parts:
                    self._record_outcome(
                        task, part, "skipped", reason=f"{_TIME_IS_UP}; {_MORE_MINUTES}"
                    )
                return
            first_new = len(self._trained.outcomes)
            self._run_process(replace(task, parts=tuple(remaining_parts)))
            finished_parts = {outcome.part for outcome in self._trained.outcomes[first_new:]}
            remaining_parts = [part for part in remaining_parts if part not in finished_parts]

    def _seconds_left(self) -> float:
        return self._until - time.monotonic()

    def _record_outcome(
        self, task: Task, part: str, state: State, seconds: float = 0.0, **details: Any
    ) -> None:
        outcome = Outcome(task.group, part, task.device, task.processes, state, seconds, **details)
        outcome.reason = anonymise(
            " ".join(outcome.reason.replace(task.folder, "FOLDER").split())[:_LONGEST]
        )
        if state in ("failed", "ended", "hung"):
            outcome.log = anonymise(
                self._log(task)[-_LOG_CHARACTERS:].replace(task.folder, "FOLDER")
            )
        self._trained.outcomes.append(outcome)
        place = f"{task.device}, {task.processes} process{'es' * (task.processes > 1)}"
        if "skipped" in outcome.result:
            outcome.state, outcome.reason = "skipped", str(outcome.result.pop("skipped"))
        summary = (
            f"{seconds:.1f} s" if outcome.state == "done" else f"{outcome.state}, {outcome.reason}"
        )
        self._say(f"{part.replace('_', ' ')} on {place}: {summary}")

    def _run_process(self, task: Task) -> None:
        """Run one process, or one on each device, until its parts are over, it ends, or a part
        takes too long.
        """
        record = task.record()
        record.unlink(missing_ok=True)
        for file in self._folder.glob(f"{task.group}-pid-*"):
            file.unlink()
        with (self._folder / f"{task.group}.log").open("wb") as log:
            process = subprocess.Popen(
                _command(task),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self._folder,
                env=_environment(task),
                start_new_session=True,
            )
        at, since, limit = 0, time.monotonic(), 0.0
        with spinner(
            lambda: f"{task.parts[min(at, len(task.parts) - 1)].replace('_', ' ')} on {task.device}"
        ):
            try:
                while at < len(task.parts):
                    part, has_exited = task.parts[at], process.poll() is not None
                    part_seconds = self._seconds * _SHARES.get(part, SHARE)
                    limit = limit or max(
                        MIN_PROCESS_SECONDS, min(self._seconds_left(), part_seconds)
                    )
                    row, took = _row(record, part), time.monotonic() - since
                    if row is not None and row["state"] == "done":
                        self._record_outcome(
                            task, part, "done", row["seconds"], result=row["result"]
                        )
                        at, since, limit = at + 1, time.monotonic(), 0.0
                    elif row is not None:
                        self._record_outcome(task, part, "failed", took, reason=row["reason"])
                        return
                    elif has_exited:
                        self._record_outcome(
                            task, part, "ended", took, reason=self._reason_of_end(task, process)
                        )
                        return
                    elif took > limit:
                        hung_reason, late_reason = (
                            f"it was not done after {took:.0f} s, and was ended",
                            f"{_TIME_IS_UP} before it was done",
                        )
                        state = state_when_late(limit, part_seconds)
                        self._record_outcome(
                            task,
                            part,
                            state,
                            took,
                            reason=hung_reason
                            if state == "hung"
                            else f"{late_reason}; {_MORE_MINUTES}",
                        )
                        return
                    else:
                        time.sleep(0.05)
            finally:
                self._kill(task, process)

    def _reason_of_end(self, task: Task, process: subprocess.Popen[bytes]) -> str:
        """The reason that a process ended by itself."""
        status = process.returncode
        ending = (
            f"was killed by {_signal(-status)}" if status < 0 else f"ended with status {status}"
        )
        marks = ("---", "===", "W", "I0")  # of torchrun's tables and its log
        lines = [
            line.strip()
            for line in self._log(task).splitlines()
            if line.strip() and not line.startswith(marks)
        ]
        return (
            f"its process {ending}; its last line: {lines[-1][:200]}"
            if lines
            else f"its process {ending}"
        )

    def _log(self, task: Task) -> str:
        try:
            return (self._folder / f"{task.group}.log").read_text("utf-8", errors="replace")
        except OSError:
            return ""

    def _kill(self, task: Task, process: subprocess.Popen[bytes]) -> None:
        """Kill the processes: torchrun's are separate sessions."""
        if process.poll() is None:
            for file in self._folder.glob(f"{task.group}-pid-*"):
                with contextlib.suppress(OSError, ValueError):
                    os.kill(int(file.read_text()), signal.SIGKILL)
        kill_session(process)


def state_when_late(limit: float, share: float) -> State:
    """The state of a part that took longer than `limit` seconds, by its share of the command's
    minutes, `share`.
    """
    return "skipped" if limit < share or share < PATIENCE else "hung"


def _row(record: Path, part: str) -> dict[str, Any] | None:
    """The last line about a finished part; None while it runs."""
    with contextlib.suppress(OSError):
        for line in record.read_text("utf-8").splitlines():
            with contextlib.suppress(ValueError):  # an unfinished line
                row: dict[str, Any] = parse_json(line)
                if row["part"] == part and row["state"] != "begun":
                    return row
    return None


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _command(task: Task) -> list[str]:
    words = [*child_command("smtrain.tools.doctor.trial"), str(task.write())]
    if task.processes == 1:
        return words
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nnodes=1",
        f"--nproc-per-node={task.processes}",
    ]
    return [
        *torchrun,
        "--master-addr=127.0.0.1",
        f"--master-port={_free_port()}",
        "--no-python",
        *words,
    ]


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
    return port


def _environment(task: Task) -> dict[str, str]:
    outer = (*_TORCHRUN, *(name for name in os.environ if name.startswith("TORCHELASTIC_")))
    inherited_variables = {name: value for name, value in os.environ.items() if name not in outer}
    variables = {
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # for deterministic kernels; read when cuBLAS starts
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
        "TORCHINDUCTOR_CACHE_DIR": str(
            Path(task.folder) / "inductor"
        ),  # so that it is compiled here and now
    }
    if sys.platform == "linux":
        variables["GLOO_SOCKET_IFNAME"] = inherited_variables.get(
            "GLOO_SOCKET_IFNAME", "lo"
        )  # all processes are on this machine
    if task.device == "cpu" and task.processes > 1 and "OMP_NUM_THREADS" not in inherited_variables:
        variables["OMP_NUM_THREADS"] = str(
            max(1, cores_here() // task.processes)
        )  # torchrun would set 1
    return inherited_variables | variables
