"""The weights that a run starts from: a model without checksums gets them when several ranks first
read it.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from smtrain.worker.checkpoint.huggingface.folder import HFSource
from smtrain.worker.checkpoint.verifying import Watch, deal
from smtrain.worker.train.base_weights import CHECKSUM_FOLDER
from tests.worker.train.launched import CONFIG, finish, lay_out, start
from tests.worker.train.test_resume import flip


def test_ranks_that_cut_a_model_differently_leave_nothing_unchecked(
    trained_inputs: dict[str, Path],
) -> None:
    """Two share what both read; the second reads half of it."""
    names = HFSource(trained_inputs["model"]).names()
    watches = [Watch(1, (i, 2)) for i in range(2)]
    for watch, read in zip(watches, (names, names[::2]), strict=True):
        source = HFSource(trained_inputs["model"])
        source.watch(watch)
        for name in read:
            source.bits(name, [(0, 1), *((0, n) for n in source.shape(name)[1:])])
    begun = watches[0].checked_names | watches[1].checked_names
    left = [watch.unchecked_names - begun for watch in watches]
    assert left[0]
    for watch, more in zip(watches, deal(left, {}), strict=True):
        watch.add(more)
    assert [watch.fault() for watch in watches] == [None, None]
    checked = [set(watch.crcs) for watch in watches]
    assert not checked[0] & checked[1]
    assert {name.split()[-1] for name in checked[0] | checked[1]} == set(names)


@pytest.mark.full
def test_ranks_of_two_stages_keep_them_together_and_find_what_has_changed(
    tmp_path: Path, trained_inputs: dict[str, Path]
) -> None:
    shell = lay_out(tmp_path / "ml", trained_inputs)
    parallel = {**CONFIG["parallel"], "tp": 1, "pp": 2}
    status, said = finish(start(shell, {"steps": 1}, {}, parallel=parallel))
    assert status == 0, said
    (kept,) = (shell.root / "checkpoints" / CHECKSUM_FOLDER).iterdir()
    assert {key.split()[-1] for key in json.loads(kept.read_text())["crc32"]} == set(
        HFSource(trained_inputs["model"]).names()
    )
    for step in (shell.root / "checkpoints").glob("step_*"):
        shutil.rmtree(step)
    flip(shell.root / "input/data/model/model.safetensors")
    status, said = finish(start(shell, {"steps": 1}, {}, parallel=parallel))
    assert status == 1, said
    assert "is not what this run first read" in shell.failure
