"""Fixtures that several parts share: a control plane of this worker's own, and a tiny model
folder.
"""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from tests import demo_inputs, durations, forked_workers, shared_imports, tiers
from tests.shared_run import kept_run, shared_run

__all__ = ["kept_run", "shared_run"]  # fixtures of all tests

# No test is timed: the first example pays for imports, and other workers may have the cores.
hypothesis.settings.register_profile("untimed", deadline=None, max_examples=tiers.examples(100))
hypothesis.settings.load_profile("untimed")

# Workers and the jobs that they start share the machine's cores. With two threads in each, which
# wait for each other while another process has the cores, all took several times as long. Local
# jobs and commands take this over.
os.environ.setdefault("OMP_NUM_THREADS", "1")

TOGETHER = (
    # A worker starts processes with torch once, and has one copy of the shared run.
    *(
        (f"tests/{part}", "worlds")
        for part in (
            "worker/engine/",
            "worker/train/test_dpo",
            "worker/train/test_loop",
            "worker/train/test_neuron",
            "worker/train/test_probe",
            "worker/train/test_profile",
            "worker/train/test_validation",
            "client/planner/test_full_shard_memory",
            "client/planner/test_memory",
        )
    ),
    *(
        (f"tests/{part}", "shared run")
        for part in (
            "client/iam/test_policy",
            "docs/test_pages",
            "docs/test_first_run_aws",
            "tools/report/",
            "core/tracking/test_run",
        )
    ),
)
"""Beginnings of files' names, and the group whose files one worker runs."""

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "torch_dtype": "float32",
}


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    """A Hugging Face folder with no tensor in its weights: enough for everything that only
    plans.
    """
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0{}      ")
    return folder


@pytest.fixture
def text_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "text"
    folder.mkdir()
    (folder / "a.jsonl").write_text('{"text": "hello world"}\n')
    return folder


@pytest.fixture
def raw(model_folder: Path, text_folder: Path) -> dict[str, Any]:
    """A valid config: 2 hosts x 2 processes, tp 2, pp 2."""
    return {
        "name": "tiny",
        "model": {"path": str(model_folder)},
        "data": {"path": str(text_folder)},
        "parallel": {"tp": 2, "pp": 2},
        "train": {"steps": 4, "global_batch_size": 4, "seq_len": 32, "precision": "fp32"},
        "compute": {
            "instance_type": "ml.trn1.2xlarge",
            "instance_count": 2,
            "processes_per_instance": 2,
        },
    }


@pytest.fixture(autouse=True)
def environment_as_it_was() -> Iterator[None]:
    """Libraries set variables while they are imported, which would change the environment of all
    later tests' processes (which could then not be a copy of the warm Python, `tests/warm.py`).
    """
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)


@pytest.hookimpl(hookwrapper=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[Any]) -> Iterator[None]:
    """Remove the variables that a fixture of a module or class adds, after the fixture has ended.

    Libraries add some too: with another environment than at its start, a worker gets no more copies
    of the warm Python.
    """
    before = set(os.environ)
    added: set[str] = set()

    def remove() -> None:
        for name in added:
            os.environ.pop(name, None)

    if fixturedef.scope in ("module", "class"):
        fixturedef.addfinalizer(remove)  # before the fixture adds its own, so it runs after them
    yield
    added |= os.environ.keys() - before


@pytest.fixture(scope="session", autouse=True)
def forked_planes() -> Iterator[None]:
    """Control planes that tests start in their own process are forks of one that has made its
    imports; those that commands start are not.
    """
    from smtrain.plane import client
    from tests.plane.planes import begin, forks

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(client, "begin", lambda command, log: begin(command[3:], Path(log.name)))
        yield
    if forks.cache_info().currsize:
        forks().close()


@pytest.fixture(scope="session", autouse=True)
def demo_inputs_made_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Workers share the demo:// inputs that one of them has made."""
    base = tmp_path_factory.getbasetemp()
    with demo_inputs.made_once(
        (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "demo-inputs"
    ):
        yield


@pytest.fixture(scope="session", autouse=True)
def machine_at_rest(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Facts of this machine that other tests change while one runs: 16 GiB of memory and 100 GiB of
    disk are free, and nothing else runs. Commands in separate processes see it as it is.
    """
    from smtrain.client.planner import this_machine
    from smtrain.core import machine
    from smtrain.core.model.footprint import GIB

    memory = tmp_path_factory.mktemp("machine") / "meminfo"
    memory.write_text(f"MemTotal: {32 << 20} kB\nMemAvailable: {16 << 20} kB\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(machine, "MEMORY", memory)
        patch.setattr(machine, "CGROUP", memory.parent)
        patch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))
        patch.setattr(this_machine, "free_disk", lambda: 100 * GIB)
        yield


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[int, str]]:
    """The measurements of this machine that were asked for: (processes, number format); each finds
    0.1 TFLOPS.
    """
    from smtrain.client.planner import probing
    from smtrain.core.config.compute import MachineEntry

    probes: list[tuple[int, str]] = []

    def entry(processes: int, number: str) -> MachineEntry:
        probes.append((processes, number))
        return MachineEntry(
            kind="cpu", devices=processes, memory_gib=4, tflops=0.1, host_memory_gib=16
        )

    monkeypatch.setattr(probing, "_file", lambda: tmp_path / probing.FILE)
    monkeypatch.setattr(probing, "_measure", entry)
    monkeypatch.setattr(probing, "load_here", lambda: 0.0)
    return probes


@pytest.fixture(scope="session")
def local_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """$SMTRAIN_HOME of this test process, whose control plane is ended at the end."""
    from smtrain.plane.client import shut_down

    folder = tmp_path_factory.mktemp("smtrain-home")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SMTRAIN_HOME", str(folder))
        yield folder
        shut_down()


@pytest.fixture(scope="session")
def trained_inputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A tiny Llama with weights and a tokenizer, and text for it: enough for a whole run."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from smtrain.core.demo.inputs import save_tokenizer

    root = tmp_path_factory.mktemp("inputs")
    (root / "text").mkdir()
    sentences = [
        f"the {a} {b} number {i}: {i * 7 % 13} {a} {b}.\n"
        for i in range(300)
        for a, b in [("red", "fox")]
    ]
    documents = ["".join(sentences[i : i + 10]) for i in range(0, len(sentences), 10)]
    (root / "text/a.jsonl").write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in documents)
    )
    save_tokenizer(documents, root / "model", vocabulary=512, end="<end>")
    torch.manual_seed(0)
    LlamaForCausalLM(
        LlamaConfig(**{k: v for k, v in LLAMA.items() if k != "torch_dtype"})
    ).save_pretrained(root / "model")
    return {"model": root / "model", "text": root / "text"}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    tiers.mark(items)


def pytest_collection_finish() -> None:
    """Count what collection has made and imported, without garbage collection until now, as old:
    all of it stays.

    It is not left frozen, because `pause_collector` asks whether something is, which visits all
    frozen objects.
    """
    gc.freeze()
    gc.unfreeze()
    gc.enable()


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `--dist loadfile` a file to a worker, and all files of a group (`TOGETHER`) to one."""
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class ByFile(LoadFileScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return next(
                (name for start, name in TOGETHER if nodeid.startswith(start)),
                super()._split_scope(nodeid),
            )

    return ByFile(config, log)


def pytest_configure(config: pytest.Config) -> None:
    gc.disable()
    config.pluginmanager.register(durations.Durations(config), "durations")
    shared_imports.use(getattr(config, "workerinput", {}).get("imports") or shared_imports.begin())
    forked_workers.use(config)


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist
def pytest_configure_node(node: Any) -> None:
    node.workerinput["imports"] = shared_imports.words()[0]


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Tests of containers say why they are skipped."""
    if item.get_closest_marker("docker"):
        from tests import docker

        if reason := docker.missing():
            pytest.skip(reason)
