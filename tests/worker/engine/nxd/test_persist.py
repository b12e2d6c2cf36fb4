"""Checkpoints of the nxd engine: written and read by the library, exact, safe on disks that are not
shared.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from smtrain.worker.checkpoint.convert import convert
from smtrain.worker.checkpoint.summary import inspect
from smtrain.worker.checkpoint.targets import Nxd, make_target
from smtrain.worker.engine.nxd import completeness
from tests.worker.engine import cases
from tests.worker.engine.cases import CONFIGS, mesh
from tests.worker.engine.nxd import cases as nxd
from tests.worker.engine.world import Died, World

pytestmark = pytest.mark.nxd


@pytest.mark.parametrize(
    ("where", "zero1", "how"),
    [
        ("211 sp", True, {}),
        ("122 m2", True, {}),
        ("121 m2", False, {"form": "xser"}),
        ("212 sp bf16", True, {"form": "xser"}),
        ("221 m2", True, {"asynchronous": True}),
        ("121 m2", True, {"form": "xser", "asynchronous": True}),
    ],
)
def test_a_resumed_run_is_the_same_bit_for_bit(
    world: dict[int, World], tmp_path: Path, where: str, zero1: bool, how: dict[str, Any]
) -> None:
    config, options = CONFIGS["llama"], replace(mesh(where), zero1=zero1)
    job = world[options.tp * options.pp * options.dp]
    known = job.run(nxd.train_and_save, config, options, tmp_path, 3, 6, how)
    checkpoint = tmp_path / "step_00000003"
    result = job.run(nxd.resume, config, options, checkpoint, 3, 6)
    assert [losses for _, losses in result] == known
    assert all(state == {"samples": 24} for state, _ in result)
    about = inspect(checkpoint)
    assert (about.kind, about.topology, about.step) == (
        "nxd",
        {"tp": options.tp, "pp": options.pp},
        3,
    )
    assert (checkpoint / "done").exists(), "other tools of NxD take it for whole too"


@pytest.mark.parametrize(
    ("name", "where"),
    [("llama", "211"), ("llama-kv4", "221"), ("gpt_neox", "121 m2"), ("llama-tied-509", "211")],
)
def test_each_engine_resumes_from_the_others_weights(
    world: dict[int, World], tmp_path: Path, name: str, where: str
) -> None:
    config, options, at = CONFIGS[name], mesh(where), 3
    there, back = tmp_path / "native", tmp_path / "nxd"
    known = world[1].run(cases.train_and_save, config, mesh("111"), there, at, at + 1)[0][0][0]
    shards = tmp_path / "shards"
    convert(there, shards, to=Nxd(tp=options.tp, pp=options.pp))
    job = world[options.tp * options.pp]
    for loss in job.run(nxd.first_loss, config, options, shards, at):
        assert abs(loss - known) < 1e-5
    job.run(nxd.train_and_save, config, options, back, at, at, {})
    for kind in ("native", "hf"):
        convert(
            back,
            tmp_path / kind / "converted",
            to=make_target(kind),
            config=_hf_folder(tmp_path, config),
        )
        loss = world[1].run(
            nxd.native_first_loss, config, mesh("111"), tmp_path / kind / "converted", at
        )[0]
        assert abs(loss - known) < 1e-5


@pytest.mark.parametrize("name", ["llama-kv1", "llama-tied-509", "gpt_neox", "mistral-window"])
def test_the_librarys_own_load_reads_converted_shards(
    world: dict[int, World], tmp_path: Path, name: str
) -> None:
    config, options = CONFIGS[name], mesh("121" if name == "llama-tied-509" else "211")
    known = world[1].run(cases.look, config, mesh("111"))[0][0]
    world[1].run(cases.save_start, config, "111", tmp_path / "native")
    qkv: Any = "separate" if name == "gpt_neox" else "grouped"
    convert(tmp_path / "native", tmp_path / "shards", to=Nxd(tp=options.tp, pp=options.pp, qkv=qkv))
    for loss in world[2].run(nxd.load_shards, config, options, tmp_path / "shards"):
        assert abs(loss - known) < 1e-5


def test_killed_without_warning_it_resumes_bit_for_bit(
    world: dict[int, World], tmp_path: Path
) -> None:
    config, options = CONFIGS["llama"], mesh("211 sp")
    for folder in ("killed", "calm"):
        (tmp_path / folder).mkdir()
    with pytest.raises(Died):
        world[2].run(nxd.train_until_killed, config, options, tmp_path / "killed", 5)
    world[2].run(nxd.train_until_killed, config, options, tmp_path / "killed", 99)
    world[2].run(nxd.train_until_killed, config, options, tmp_path / "calm", 99)
    lines = (tmp_path / "killed" / "losses").read_text().splitlines()
    assert lines[4:6] == lines[6:8], (
        "the steps after the last checkpoint were done again, with the same losses"
    )
    assert lines[:4] + lines[6:] == (tmp_path / "calm" / "losses").read_text().splitlines()


@pytest.mark.parametrize("how", [{}, {"form": "xser"}, {"asynchronous": True}])
def test_hosts_that_share_no_disk_save_prune_and_resume(
    world: dict[int, World], tmp_path: Path, how: dict[str, Any]
) -> None:
    config, options = CONFIGS["llama"], mesh("212 sp")
    hosts = [tmp_path / "algo-1", tmp_path / "algo-2"]
    for host in hosts:
        host.mkdir()
    world[4].run(nxd.save_on_hosts, config, options, hosts, how)
    bucket = tmp_path / "bucket"
    for host in hosts:
        assert sorted(p.name for p in host.iterdir()) == ["step_00000002", "step_00000003"]
        assert any((host / "step_00000003").rglob("*.pt"))
        shutil.copytree(host, bucket, dirs_exist_ok=True)
    assert completeness.fault(hosts[0] / "step_00000003") is not None, "a host alone has half of it"
    for step in (2, 3):
        assert completeness.fault(bucket / f"step_{step:08d}") is None
    world[4].run(nxd.resume, config, options, bucket / "step_00000003", 3, 4)


@pytest.mark.parametrize("steps", [0, 1])
@pytest.mark.parametrize(("where", "zero1"), [("112", True), ("211", False)])
def test_weights_that_are_no_numbers_are_not_saved(
    world: dict[int, World], tmp_path: Path, where: str, zero1: bool, steps: int
) -> None:
    options = replace(mesh(where), zero1=zero1)
    for sentence, left in world[2].run(
        nxd.save_what_is_no_number, CONFIGS["llama"], options, tmp_path, steps
    ):
        assert sentence.startswith("checkpoint step_00000001 was not begun on rank ")
        assert sentence.endswith("its weights are not all finite numbers")
        assert left == []


def test_what_cannot_be_loaded_or_built_is_a_sentence_on_every_rank(
    world: dict[int, World], tmp_path: Path
) -> None:
    config = CONFIGS["llama"]
    world[2].run(nxd.train_and_save, config, mesh("211"), tmp_path, 1, 1, {})
    for sentence in world[2].run(nxd.refusal, config, mesh("121"), tmp_path / "step_00000001"):
        assert "was written with tp 2 (here 1), pp 1 (here 2)" in sentence
    next((tmp_path / "step_00000001" / "model").iterdir()).unlink()
    for sentence in world[2].run(nxd.refusal, config, mesh("211"), tmp_path / "step_00000001"):
        assert "is missing" in sentence
    for sentence in world[2].run(nxd.refusal, config, mesh("211 bf16")):
        assert "gradients are silently wrong with precision bf16" in sentence


def _hf_folder(root: Path, config: dict[str, Any]) -> Path:
    import json

    folder = root / "described"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder
