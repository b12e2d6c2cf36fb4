"""kill -9 in the middle of a conversion: a whole output or none, and a rerun completes it.

$SMTRAIN_KILLS asks for more of them, $SMTRAIN_KILLED for only one kind of target.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from smtrain.core.errors import CheckpointError
from smtrain.worker.checkpoint import execute, staging
from smtrain.worker.checkpoint.convert import convert
from smtrain.worker.checkpoint.summary import diff, verify
from smtrain.worker.checkpoint.targets import HuggingFace, Megatron, NemoMegatron, Nxd, Target
from tests.worker.checkpoint.folders import LLAMA, hf_folder
from tests.worker.engine.world import CONTEXT

COUNT = int(os.environ.get("SMTRAIN_KILLS", "6"))
full = pytest.mark.full
CONFIG = {
    **LLAMA,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 8,
    "vocab_size": 2000,
}
HOW: dict[str, Target] = {
    "nxd": Nxd(tp=2, pp=2),
    "xser": Nxd(tp=2, form="xser"),
    "hf": HuggingFace(),
    "torch": Megatron(form="torch", pp=2),
    "torch_dist": Megatron(),
    "nnm": NemoMegatron(form="xser", release="2.15"),
    "nnm-ckpt": NemoMegatron(tp=2, pp=2),
}


def whole(target: Path, source: Path) -> bool:
    """Whether there is an output; if so, it must be complete."""
    try:
        verify(target)
    except CheckpointError:
        return False
    assert not list(diff(source, target))
    return True


@pytest.mark.parametrize("count", [1, pytest.param(COUNT, marks=full)])
def test_a_whole_output_or_none_and_a_rerun_completes_it(tmp_path: Path, count: int) -> None:
    rng = random.Random(4)
    source = hf_folder(tmp_path / "hf", CONFIG)
    began = time.monotonic()
    convert(source, tmp_path / "first", to=Nxd(tp=2, pp=2))
    took = time.monotonic() - began
    warm = CONTEXT.Process(
        target=convert, args=(source, tmp_path / "warm"), kwargs={"to": HOW["nxd"]}
    )
    warm.start()
    warm.join()
    assert warm.exitcode == 0
    seen = {"none": 0, "whole": 0, "resumable": 0}
    for n in range(count):
        name = os.environ.get("SMTRAIN_KILLED") or rng.choice(sorted(HOW))
        target = tmp_path / f"out{n}"
        if exists := rng.random() < 0.5:
            target.mkdir()
            (target / "mine").write_text("kept")
        process = CONTEXT.Process(target=convert, args=(source, target), kwargs={"to": HOW[name]})
        process.start()
        time.sleep(rng.uniform(0, 3 * took))
        process.kill()  # SIGKILL
        process.join()
        if not exists and target.exists():
            assert whole(target, source), name
        seen["whole" if whole(target, source) else "none"] += 1
        partial = target / ".partial" if exists else tmp_path / f".out{n}.partial"
        journal = partial / staging.JOURNAL
        seen["resumable"] += len(journal.read_text().splitlines()) > 1 if journal.exists() else 0
        convert(source, target, to=HOW[name])
        assert whole(target, source), name
        assert not partial.exists()
        assert (target / "mine").exists() == exists
    print(f"{count} kills: {seen}")
    assert sum(seen.values()) >= count


def convert_and_die(source: Path, target: Path, moment: int, full: bool) -> None:
    """Be killed before the `moment`-th change of files; `full`: the disk is full after all
    tensors.
    """
    left = [moment]
    for name in ("replace", "rename", "unlink", "rmdir", "ftruncate", "mkdir", "write"):
        real = getattr(os, name)

        def counted(*args: Any, real: Any = real, **kwargs: Any) -> Any:
            left[0] -= 1
            if left[0] < 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **kwargs)

        setattr(os, name, counted)
    if full:

        def no_space(*_: Any) -> Any:
            raise OSError(28, "No space left on device")

        vars(execute)["manifest"] = no_space
    with suppress(CheckpointError):
        convert(source, target, to=Nxd(tp=2), overwrite=True)


@pytest.mark.parametrize(
    ("exists", "no_space", "every"),
    [
        ("new", False, 6),
        ("another's", False, 6),
        pytest.param("new", False, 1, marks=full),
        pytest.param("new", True, 1, marks=full),
        pytest.param("empty", False, 1, marks=full),
        pytest.param("the same", False, 1, marks=full),
        pytest.param("another's", False, 1, marks=full),
    ],
)
def test_every_change_of_the_tree_may_be_the_last(
    tmp_path: Path, exists: str, no_space: bool, every: int
) -> None:
    """Kill a conversion before each change of files, or before every n-th."""
    source = hf_folder(tmp_path / "hf", {**LLAMA, "num_hidden_layers": 1})
    start = tmp_path / "start" / "out"
    if exists == "empty":
        start.mkdir(parents=True)
    elif exists == "the same":
        convert(source, start, to=Nxd(tp=2))
    elif exists == "another's":  # its journal must go before the files that it tells of
        start.mkdir(parents=True)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(execute, "manifest", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                convert(source, start, to=HuggingFace())
    for moment in range(0, 200, every):
        target = tmp_path / f"out{moment}"
        if start.exists():
            shutil.copytree(start, target)
        process = CONTEXT.Process(target=convert_and_die, args=(source, target, moment, no_space))
        process.start()
        process.join()
        if target.exists() and not whole(target, source) and exists == "another's":
            other = tmp_path / f"other{moment}"
            shutil.copytree(target, other)
            with suppress(CheckpointError):  # half of the one
                convert(source, other, to=HuggingFace(), overwrite=True)
                assert whole(other, source), moment
        convert(source, target, to=Nxd(tp=2), overwrite=True)
        assert whole(target, source), moment
        if process.exitcode == 0:
            break
    assert process.exitcode == 0
    assert moment > 10


def test_what_was_done_is_not_done_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = hf_folder(tmp_path / "hf", LLAMA)
    real = vars(execute)["run"]
    calls: list[str] = []

    def stops(job: Any, *rest: Any) -> Any:
        calls.append(job[0].name)
        if len(calls) == 12:
            raise KeyboardInterrupt
        return real(job, *rest)

    monkeypatch.setattr(execute, "run", stops)
    monkeypatch.setattr("smtrain.worker.checkpoint.conversion_plan.cores_here", lambda: 1)
    with pytest.raises(KeyboardInterrupt):
        convert(source, tmp_path / "out", to=Nxd(tp=2, pp=2))
    done, total = len(calls) - 1, 2 + 1 + 8 * 3
    calls.clear()
    monkeypatch.setattr(
        execute, "run", lambda job, *rest: calls.append(job[0].name) or real(job, *rest)
    )
    convert(source, tmp_path / "out", to=Nxd(tp=2, pp=2))
    assert len(calls) == total - done
    assert whole(tmp_path / "out", source)
