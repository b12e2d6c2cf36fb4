"""`smtrain doctor --train` runs whole on the CPU, and a part that crashes or hangs ends alone."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from smtrain.client.planner.machines import GIB
from smtrain.core.model.shape import ModelShape
from smtrain.tools.doctor import training, verdicts
from smtrain.tools.doctor.devices import TorchView
from smtrain.tools.doctor.sizes import large_model, predict_speed
from smtrain.tools.doctor.task import SizedModel, ladder, small_model, with_layers
from smtrain.tools.doctor.training import ALL_DEVICES, CPU, ONE_DEVICE, Outcome, Trials
from tests.conftest import LLAMA
from tests.typed import typed

ALONE = ["transformers", "fp32", "resume", "export", "speed", "plain_speed", "bf16", "compile"]
TOGETHER = ["fp32", "resume", "speed"]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))
    return folder


@pytest.fixture
def inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Code that runs in every started Python."""

    def put(code: str) -> None:
        (tmp_path / "sitecustomize.py").write_text(code)
        monkeypatch.setenv(
            "PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
        )

    return put


def trained(file: Path) -> tuple[dict[str, Any], dict[tuple[str, str], dict[str, Any]]]:
    """The content of the JSON, and its outcomes by group and part."""
    written = json.loads(file.read_text())
    return written, {(one["group"], one["part"]): one for one in written["training"]["outcomes"]}


@pytest.mark.slow
@pytest.mark.full  # the gate has its parts and verdicts below
def test_it_runs_whole_on_the_cpu(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "_MEASUREMENT_DIVISOR", 960)  # half a second for each measurement
    file, page = tmp_path / "out.json", tmp_path / "out.html"
    words = ["--minutes", "8", "--model", str(model), "--json", str(file), "--page", str(page)]
    done = typed("doctor", "--train", *words, CXX="no-compiler")
    assert done.returncode == 0, done.stdout + done.stderr
    written, outcomes = trained(file)
    assert list(outcomes) == [
        *((CPU, part) for part in ALONE),
        *((ALL_DEVICES, part) for part in TOGETHER),
    ]
    states = {key: one["state"] for key, one in outcomes.items()}
    assert states.pop((CPU, "compile")) == "skipped"
    assert "no-compiler" in outcomes[CPU, "compile"]["reason"]
    assert set(states.values()) == {"done"}, written["training"]["outcomes"]
    checks = [row["check"] for row in written["findings"] if row["level"] == "ok"]
    assert checks.count("parity") == 3, (
        "transformers against the CPU, tp 2 and dp 2 against the CPU"
    )
    assert checks.count("resume") == 2
    assert {"bf16", "checkpoint", "memory use", "operators"} <= set(checks)
    assert written["training"]["figures"][CPU]["plain_tokens_per_s"] > 0
    assert written["training"]["figures"][ALL_DEVICES]["processes"] == 2
    operators = outcomes[CPU, "fp32"]["result"]["runs"][0]["operators"]
    assert any(
        row[0] == "aten.mm" and row[1].startswith("float32[2d]") and row[3] > 20
        for row in operators
    )
    losses = [row["loss"] for row in outcomes[CPU, "fp32"]["result"]["runs"][0]["steps"]]
    assert len(losses) == 20
    assert losses[-1] < losses[0]
    assert len(done.stderr.splitlines()) == len(outcomes), "a line for each part"
    shown = page.read_text()
    assert not re.search(r"(?:src|href)=['\"]?(?:https?:)?//|url\(|@import|<script", shown)
    assert "default-src &#39;none&#39;" in shown or "default-src 'none'" in shown
    assert shown.count("<figure") == 2


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a compiler")
def test_it_compiles_and_chooses_its_own_models(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    done = typed("doctor", "--train", "--minutes", "10", "--json", str(file))
    assert done.returncode == 0, done.stdout + done.stderr
    _, outcomes = trained(file)
    assert {one["state"] for one in outcomes.values()} == {"done"}, done.stderr
    assert (
        outcomes[CPU, "compile"]["result"]["first_step_s"]
        > outcomes[CPU, "compile"]["result"]["step_s"]
    )


BROKEN = """
import importlib.machinery, os, sys, time
class Breaks:
    def find_spec(self, name, path=None, target=None):
        if name != "smtrain.tools.doctor.trial":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        real = spec.loader.exec_module
        def fails(self):
            raise RuntimeError("NRT EXECUTION FAILED")
        def run(module):
            real(module)
            module.TrialProcess.export = lambda self: os.abort()
            module.TrialProcess.speed = lambda self: time.sleep(1000)
            module.TrialProcess.bf16 = fails
        spec.loader.exec_module = run
        return spec
sys.meta_path.insert(0, Breaks())
"""


@pytest.mark.full
@pytest.mark.slow
def test_parts_that_crash_hang_or_fail_end_alone(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inside: Any
) -> None:
    inside(BROKEN)
    monkeypatch.setattr(training, "_MEASUREMENT_DIVISOR", 120)
    monkeypatch.setitem(training._SHARES, "speed", 0.05)
    monkeypatch.setattr(training, "MIN_PROCESS_SECONDS", 1.0)
    monkeypatch.setattr(training, "PATIENCE", 1.0)
    file = tmp_path / "out.json"
    words = ["--minutes", "4", "--model", str(model), "--json", str(file)]
    done = typed("doctor", "--train", *words, CXX="no-compiler")
    assert done.returncode == 2
    written, outcomes = trained(file)
    assert outcomes[CPU, "export"]["state"] == "ended"
    assert "was killed by SIGABRT" in outcomes[CPU, "export"]["reason"]
    assert outcomes[CPU, "speed"]["state"] == outcomes[ALL_DEVICES, "speed"]["state"] == "hung"
    assert outcomes[CPU, "bf16"]["state"] == "failed"
    assert outcomes[CPU, "bf16"]["reason"] == "RuntimeError: NRT EXECUTION FAILED"
    assert "Traceback" in outcomes[CPU, "bf16"]["log"]
    assert "smtrain-doctor-" not in json.dumps(written["training"]["outcomes"]), (
        "no folder of this machine"
    )
    assert {
        outcomes[key]["state"]
        for key in ((CPU, "fp32"), (CPU, "resume"), (CPU, "plain_speed"), (ALL_DEVICES, "resume"))
    } == {"done"}
    faults = [row["check"] for row in written["findings"] if row["level"] == "fault"]
    assert sorted(faults) == ["bf16", "checkpoint", "throughput", "throughput"]
    assert not [row for row in processes() if "smtrain.tools.doctor.trial" in row]


SMALL_PROBE = """
import importlib.machinery, sys
class Smaller:
    def find_spec(self, name, path=None, target=None):
        if name != "smtrain.worker.train.probe":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        real = spec.loader.exec_module
        def run(module):
            real(module)
            module._SIDE["neuron"], module._MESSAGE["neuron"] = 256, 2**20
        spec.loader.exec_module = run
        return spec
sys.meta_path.insert(0, Smaller())
"""
"""For a processor in the place of an accelerator: a product of large matrices would take it
minutes.
"""


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="the imitated device is compiled")
def test_it_runs_whole_on_the_imitated_neuron_device(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inside: Any
) -> None:
    """torch loads the device by itself, as it loads TorchNeuron: by an entry point of an installed
    package.
    """
    inside(SMALL_PROBE)
    record = tmp_path / "imitated-1.0.dist-info"
    record.mkdir()
    (record / "METADATA").write_text("Metadata-Version: 2.1\nName: imitated\nVersion: 1.0\n")
    (record / "entry_points.txt").write_text("[torch.backends]\nneuron = two_cores:start\n")
    code = (
        "from tests.worker.engine.neuron import"
        " imitation\nimitation.start(imitation.Limits(devices=2))\n"
    )
    (tmp_path / "two_cores.py").write_text("def start():\n    " + code.replace("\n", "\n    "))
    root = str(Path(__file__).parents[3])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([os.environ["PYTHONPATH"], root]))
    monkeypatch.setattr(training, "_MEASUREMENT_DIVISOR", 1200)
    file = tmp_path / "out.json"
    done = typed("doctor", "--train", "--minutes", "10", "--model", str(model), "--json", str(file))
    assert done.returncode == 0, done.stdout + done.stderr
    written, outcomes = trained(file)
    assert written["training"]["kind"] == "neuron"
    groups = [(CPU, ALONE[:2]), (ONE_DEVICE, [ALONE[1], *ALONE[2:]]), (ALL_DEVICES, TOGETHER)]
    assert list(outcomes) == [(group, part) for group, parts in groups for part in parts]
    assert {one["state"] for one in outcomes.values()} == {"done"}, done.stderr
    checks = [row["check"] for row in written["findings"] if row["level"] == "ok"]
    assert checks.count("parity") == 4, "transformers, one process, tp 2 and dp 2"
    assert checks.count("resume") == 2
    operators = outcomes[ONE_DEVICE, "fp32"]["result"]["runs"][0]["operators"]
    assert any(row[0].startswith("aten.mm") and row[2] == "neuron" for row in operators)


def processes() -> list[str]:
    """The command lines of all processes, but those of other tests."""
    rows = []
    for file in Path("/proc").glob("[0-9]*"):
        try:
            if f"TESTS_WORKER={os.environ.get('TESTS_WORKER')}" in (file / "environ").read_text(
                errors="replace"
            ):
                rows.append((file / "cmdline").read_text(errors="replace").replace("\0", " "))
        except OSError:
            continue
    return rows


@pytest.mark.full
@pytest.mark.slow
def test_time_that_is_up_is_said_and_an_interruption_leaves_nothing(
    model: Path, tmp_path: Path
) -> None:
    done = typed("doctor", "--train", "--minutes", "0.01", "--model", str(model))
    assert done.returncode == 0
    assert len(re.findall("the time is up; give more with --minutes", done.stdout)) >= 8
    assert "--minutes 20" in done.stdout
    command = [sys.executable, "-m", "smtrain", "doctor", "--train", "--model", str(model)]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    started = subprocess.Popen(
        command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    until = time.monotonic() + 60
    while (
        not (pids := list(tmp_path.glob("smtrain-doctor-*/cpu-pid-0"))) and time.monotonic() < until
    ):
        time.sleep(0.02)
    pid = int(pids[0].read_text())
    started.send_signal(signal.SIGINT)
    assert started.wait(30) == 130
    assert not list(tmp_path.glob("smtrain-doctor-*"))
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_broken_machine_is_not_trained_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inside: Any
) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").write_text("raise ImportError('broken')")
    inside("")
    done = typed("doctor", "--train")
    assert done.returncode == 2
    assert "nothing was trained, as a fault prevents it" in done.stdout
    assert done.stderr == ""


# Verdicts


def steps(*losses: float, norm: float = 1.0, skip: int = 0) -> list[dict[str, Any]]:
    skipped = [{"loss": losses[0], "grad_norm": float("inf"), "skipped": True, "updates": 0}] * skip
    return skipped + [
        {"loss": loss, "grad_norm": norm, "updates": k} for k, loss in enumerate(losses)
    ]


def outcome(part: str, result: dict[str, Any], group: str = CPU) -> Outcome:
    return Outcome(group, part, "cpu", 1 if group == CPU else 2, "done", 1.0, result=result)


def run(*losses: float, weights: int = 1) -> dict[str, Any]:
    return {
        "runs": [
            {
                "tp": 1,
                "dp": 1,
                "steps": steps(*losses),
                "weights": [weights],
                "operators": [],
                "step_s": 1.0,
            }
        ],
        "fell_back": [],
    }


def verdict(*outcomes: Outcome) -> dict[str, str]:
    """The levels of the findings about training, by check."""
    small = SizedModel(ladder()[0], 4, 128, 2)
    found = Trials("cpu", 2, small, small, "fp32", [], list(outcomes))
    return {one.check: one.level for one in verdicts.findings(found, TorchView())}


TWENTY = [8.0 - k / 10 for k in range(20)]


@pytest.mark.parametrize(
    ("other", "level"),
    [
        (TWENTY, "ok"),
        ([*TWENTY[:-1], TWENTY[-1] * 1.00005], "ok"),
        ([*TWENTY[:-1], TWENTY[-1] * 1.001], "fault"),
        ([*TWENTY[:-1], float("nan")], "fault"),
    ],
)
def test_losses_that_differ_are_a_fault(other: list[float], level: str) -> None:
    assert (
        verdict(outcome("transformers", {"steps": steps(*other)}), outcome("fp32", run(*TWENTY)))[
            "parity"
        ]
        == level
    )


def test_one_bit_after_a_resume_is_a_fault() -> None:
    whole = outcome("fp32", run(*TWENTY))
    rest = steps(*TWENTY)[10:]
    same = outcome("resume", {"from": 10, "steps": rest, "weights": [1]})
    assert verdict(whole, same)["resume"] == "ok"
    other = [*rest[:-1], {**rest[-1], "loss": rest[-1]["loss"] * (1 + 2**-52)}]
    assert (
        verdict(whole, outcome("resume", {"from": 10, "steps": other, "weights": [1]}))["resume"]
        == "fault"
    )
    assert (
        verdict(whole, outcome("resume", {"from": 10, "steps": rest, "weights": [2]}))["resume"]
        == "fault"
    )


def test_half_precision_may_skip_steps_but_not_diverge() -> None:
    whole = outcome("fp32", run(*TWENTY))
    near = steps(*(loss * 1.01 for loss in TWENTY[:17]), skip=3)
    assert verdict(whole, outcome("fp16", {"steps": near, "finite": True}))["fp16"] == "ok"
    assert verdict(whole, outcome("fp16", {"steps": near, "finite": False}))["fp16"] == "fault"
    far = steps(*(loss * 1.1 for loss in TWENTY))
    assert verdict(whole, outcome("bf16", {"steps": far, "finite": True}))["bf16"] == "fault"
    assert (
        verdict(whole, outcome("fp16", {"steps": steps(1.0, skip=20)[:20], "finite": True}))["fp16"]
        == "fault"
    )


def test_speed_memory_and_operators_are_warnings() -> None:
    rate = {
        "tokens_per_s": 100.0,
        "peak_bytes": 10 * GIB,
        "peak_from": "the allocator",
        "multiplied_tflops": 0.1,
        "moved_gbs": None,
    }
    fell = {**run(*TWENTY), "fell_back": ["aten::cummax"]}
    levels = verdict(
        outcome("fp32", fell),
        outcome("speed", rate),
        outcome("plain_speed", {"tokens_per_s": 200.0, "peak_bytes": 1}),
        outcome("export", {"difference": 1.0, "largest": 2.0}),
    )
    assert {
        key: levels[key] for key in ("operators", "throughput", "plan", "memory use")
    } == dict.fromkeys(("operators", "throughput", "plan", "memory use"), "warning")
    assert levels["checkpoint"] == "fault"


def test_the_fastest_setting_is_named_with_its_gain() -> None:
    pairs = [
        (False, True, 44_783.0),
        (False, False, 47_956.0),
        (True, True, 53_466.0),
        (True, False, 58_517.0),
    ]
    rows = [
        {"compile": compiled, "deterministic": same, "tokens_per_s": rate, "first_step_s": 9.0}
        for compiled, same, rate in pairs
    ]
    small = SizedModel(ladder()[0], 4, 128, 2)

    def said(rows: list[dict[str, Any]], fault: str | None) -> str:
        found = Trials("cuda", 1, small, small, "bf16", [], [])
        found.outcomes.append(
            Outcome(
                ONE_DEVICE,
                "settings",
                "cuda",
                1,
                "done",
                result={"rows": rows, "uncompiled": fault},
            )
        )
        (finding,) = verdicts.findings(found, TorchView())
        assert (finding.check, finding.level) == ("settings", "ok")
        return finding.text

    assert (
        said(rows, None)
        == "the fastest is train.compile: true, train.deterministic: false: 58,517 tokens/s, 1.31"
        " times the 44,783 of uncompiled and deterministic steps; its first step takes 9 s"
    )
    assert said(rows[:2], "no gcc").endswith(
        "uncompiled and deterministic steps; nothing was compiled: no gcc"
    )
    failed = Trials(
        "cuda",
        1,
        small,
        small,
        "bf16",
        [],
        [Outcome(ONE_DEVICE, "settings", "cuda", 1, "failed", reason="x")],
    )
    assert [one.level for one in verdicts.findings(failed, TorchView())] == ["warning"]


# Sizes


def view(name: str, gib: float, count: int = 8) -> TorchView:
    rows = [
        {"index": i, "name": name, "free": gib * GIB, "total": gib * GIB, "works": True}
        for i in range(count)
    ]
    return TorchView(
        "cuda", count, {"devices": rows, "torch": "2.13.0", "cuda": "13.0", "hip": None}
    )


def test_a_device_gets_the_largest_model_that_suits_it() -> None:
    sizes = {
        name: large_model(None, view(name, gib), 16, 8)[0].shape.parameters()
        for name, gib in (("NVIDIA L4", 22), ("NVIDIA H100 80GB HBM3", 79), ("NVIDIA T400", 1.5))
    }
    assert sizes["NVIDIA H100 80GB HBM3"] > 1e9 > sizes["NVIDIA L4"] > 1e8 > sizes["NVIDIA T400"]
    assert large_model(None, TorchView(), 2, 2)[0].shape.parameters() < 26e6 < 1e9


@pytest.mark.full
def test_a_given_model_keeps_as_many_layers_as_fit() -> None:
    given = {
        **LLAMA,
        "num_hidden_layers": 400,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "head_dim": 256,
        "layer_types": ["full_attention"] * 400,
    }
    large, note = large_model(given, view("NVIDIA L4", 22), 16, 8)
    layers = large.config["num_hidden_layers"]
    assert 1 < layers < 400
    assert len(large.config["layer_types"]) == layers
    assert note == f"speed and memory are of {layers} of the given model's 400 layers"
    small, about = small_model(given, [8])
    assert "the given model is too large" in about
    assert small.batch % 8 == 0
    tiny, about = small_model(LLAMA, [2])
    assert (about, tiny.config) == ("", with_layers(LLAMA, 2))
    assert ModelShape.from_config(tiny.config).layers == 2


def test_the_prediction_is_that_of_the_chip_if_the_planner_knows_it() -> None:
    measured = {"multiplied_tflops": 50.0, "moved_gbs": 10.0}
    large, _ = large_model(None, view("NVIDIA H100 80GB HBM3", 79), 16, 8)
    known = predict_speed(large, "bf16", view("NVIDIA H100 80GB HBM3", 79), 1, measured)
    assert known.peak_flops == 989e12
    assert known.low < known.tokens_per_s < known.high
    for name in ("NVIDIA H100 PCIe", "AMD Instinct MI300X"):
        other = predict_speed(large, "bf16", view(name, 79), 1, measured)
        assert other.peak_flops is None
        assert other.machine == "this machine by its measured 50 TFLOP/s"
    assert predict_speed(large, "bf16", view("NVIDIA L40S", 44), 1, measured).machine.startswith(
        "g6e"
    )


@pytest.mark.parametrize(
    ("limit", "own", "state"),
    [(60.0, 60.0, "hung"), (20.0, 60.0, "skipped"), (6.0, 6.0, "skipped")],
)
def test_a_part_hangs_only_if_it_had_its_time(limit: float, own: float, state: str) -> None:
    """With few minutes a compilation had 6 seconds, and the report told the user to switch it
    off.
    """
    assert training.state_when_late(limit, own) == state
