"""Several configs in order, each of which may start from the run before."""

from __future__ import annotations

import itertools
import json
import runpy
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

import smtrain
from smtrain.client.backends.sagemaker.backend import SageMakerBackend
from smtrain.client.launch.stages import Chain
from smtrain.client.planner.resolve import with_models
from smtrain.client.runs.series import load_series, overview, run_series, with_expected_exports
from smtrain.stages import stages_of
from testing.plane import plane
from tests.client.jobs.test_parents import exported
from tests.typed import typed

EXAMPLE = Path(__file__).parents[3] / "examples/preferences"


@pytest.fixture
def chain(raw: dict[str, Any], local_home: Path) -> list[dict[str, Any]]:
    """Three configs that start from each other."""
    named = [{**raw, "name": name} for name in ("one", "two", "three")]
    for before, config in itertools.pairwise(named):
        config["model"] = {"path": f"run://{before['name']}"}
    return named


def faults(configs: list[dict[str, Any]], **how: Any) -> list[str]:
    with pytest.raises(smtrain.ConfigError) as caught:
        load_series(configs, **how)
    return caught.value.faults


def test_all_are_planned_and_expected_before_the_first_has_run(
    chain: list[dict[str, Any]], tmp_path: Path
) -> None:
    links = load_series(chain)
    first = chain[0]["model"]["path"]
    assert [link.config.model.path for link in links] == [first] * 3
    assert [link.start for link in links] == [first, "run://one", "run://two"]
    said = overview(links)
    assert [line.split()[0] for line in said.splitlines()[1:4]] == ["one", "two", "three"]
    configs = with_expected_exports(links)
    model = Chain(configs[0], SageMakerBackend("local"), look=False).base_name("export")
    assert f"/one/jobs/{model}/output/model/" in configs[1].model.path
    on_aws = load_series(
        chain,
        target="aws",
        compute={"role": "arn:aws:iam::123456789012:role/r", "region": "us-east-1"},
    )
    costs = [line for line in overview(on_aws).splitlines() if "$" in line]
    assert len(costs) == 4
    *each, total = (float(line.rpartition("$")[2].replace(",", "")) for line in costs)
    assert total == pytest.approx(sum(each), abs=0.02)
    learning = {
        **chain[2],
        "train": {**chain[2]["train"], "objective": "dpo", "dpo": {"reference": "run://two"}},
    }
    reading = with_expected_exports(load_series([*chain[:2], learning]))[2]
    assert reading.train.dpo is not None
    assert reading.train.dpo.reference == reading.model.path
    files = []
    for config in chain:
        files.append(tmp_path / f"{config['name']}.yaml")
        files[-1].write_text(yaml.safe_dump(config))
    beside = typed("plan", *map(str, files), "--target", "aws")
    assert beside.returncode == 0, beside.stderr
    dry = typed("run", *map(str, files), "--dry-run")
    assert dry.returncode == 0, dry.stderr
    assert "3 runs, in this order:" in dry.stderr
    requests = [json.loads(part) for part in dry.stdout.replace("]\n[", "]\x00[").split("\x00")]
    assert [{job["TrainingJobName"].split("-")[0] for job in jobs} for jobs in requests] == [
        {"one"},
        {"two"},
        {"three"},
    ]


def test_a_run_after_one_that_extends_the_model_may_use_its_positions(
    chain: list[dict[str, Any]],
) -> None:
    one, two, three = ({**config, "train": {**config["train"], "seq_len": 512}} for config in chain)
    assert "beyond the model's 256 positions" in faults([one, two])[0]
    one["model"] = {**one["model"], "rope": {"type": "yarn", "factor": 2}}
    links = load_series([one, two, three])
    assert [link.config.model.rope is None for link in links] == [False, True, True]
    assert [config.train.seq_len for config in with_expected_exports(links)] == [512] * 3


def test_an_order_that_cannot_run_is_refused_before_anything_starts(
    chain: list[dict[str, Any]],
) -> None:
    one, two, three = chain
    assert (
        "run://one is a later config of the list; put that one before it" in faults([two, one])[0]
    )
    assert (
        "an earlier config of the list is also one; give each its own name" in faults([one, one])[0]
    )
    assert "there is no such run on this machine" in faults([one, three])[0]
    adapted = {**one, "train": {**one["train"], "adapter": {}}, "export": {"merge": False}}
    assert "will export an adapter" in faults([adapted, two])[0]
    cluster = {"target": "slurm", "cluster": {"shared": "/fsx"}}
    assert "runs on target local, and this config on slurm" in faults([one, {**two, **cluster}])[0]
    bad = {**one, "train": {**one["train"], "lr": -1}}
    told = faults([bad, two, {**three, "name": "b c"}])
    assert told[0].startswith("config 1: train.lr")
    assert any(fault.startswith("config 3: name") for fault in told)
    with pytest.raises(smtrain.ConfigError, match="list of configs is empty"):
        smtrain.run([])
    with pytest.raises(smtrain.ConfigError, match="followed to its end"):
        smtrain.run([one, two], wait=False)


def test_a_series_that_is_done_is_skipped_and_each_starts_from_the_run_of_the_list(
    chain: list[dict[str, Any]],
) -> None:
    control, target = plane(), SageMakerBackend("local")
    chain = [{**config, "name": f"done-{config['name']}"} for config in chain[:2]]
    chain[1]["model"] = {"path": "run://done-one"}
    path = ""
    for link in load_series(chain):
        config = with_models(link.config, {"model.path": path}) if path else link.config
        names = {
            stage: Chain(config, target, look=False).base_name(stage)
            for stage in stages_of(config, "local")
        }
        for stage, name in names.items():
            if stage != "export":
                control.synthetic_job(lines=1, name=name)
        path = exported(config.name, names["export"][-8:])
    exported("done-one", "abcdef01")  # newer, of other settings: not the one of this list
    said: list[str] = []
    runs = smtrain.run(chain, say=said.append)
    assert all(result.skipped for run in runs for result in run.results)
    assert f"/{runs[0].job('export').name}/" in runs[1].config.model.path
    assert "run 2 of 2: done-two (config 2)" in said


def test_the_first_failure_ends_it_and_names_what_was_not_started(
    chain: list[dict[str, Any]],
) -> None:
    links = load_series(chain)
    begun: list[str] = []

    def fail(config: smtrain.JobConfig) -> smtrain.Run:
        begun.append(config.name)
        raise smtrain.JobError("one-train failed: boom; mend it", code="job.failed")

    with pytest.raises(smtrain.JobError) as caught:
        run_series(links, fail, lambda _: None)
    assert str(caught.value).startswith("one-train failed: boom; mend it")
    assert (
        "in run one (config 1); not started: two, three; the same call skips what is done"
        in str(caught.value)
    )
    assert caught.value.code == "job.failed"
    assert begun == ["one"]


def test_the_example_is_a_series_of_three_objectives(local_home: Path, tmp_path: Path) -> None:
    for name in ("text", "chats", "pairs", "held-out"):
        (tmp_path / "data" / name).mkdir(parents=True)
        (tmp_path / "data" / name / "help.jsonl").write_text('{"text": "w"}\n')
    for file in EXAMPLE.glob("*.yaml"):
        shutil.copy(file, tmp_path)
    links = load_series([tmp_path / f"{name}.yaml" for name in ("pretrain", "sft", "dpo")])
    assert [link.config.train.objective for link in links] == ["pretrain", "sft", "dpo"]
    assert [link.start for link in links] == [
        "demo://smollm2",
        "run://help-text",
        "run://help-chat",
    ]


@pytest.mark.full  # test_the_example_is_a_series... has its configs
def test_the_example_s_data_have_no_function_in_common(tmp_path: Path) -> None:
    made = runpy.run_path(str(EXAMPLE / "make.py"))["make"](tmp_path)
    assert set(made) == {f"{name}/help.jsonl" for name in ("text", "chats", "pairs", "held-out")}
    read = {
        name: [json.loads(line) for line in (tmp_path / name).read_text("utf-8").splitlines()]
        for name in made
    }
    assert {name: len(rows) for name, rows in read.items()} == made
    pairs = [*read["pairs/help.jsonl"], *read["held-out/help.jsonl"]]
    asked = [row["prompt"][0]["content"] for row in pairs] + [
        row["instruction"] for row in read["chats/help.jsonl"]
    ]
    assert len(set(asked)) == len(asked)
    assert all(row["chosen"] != row["rejected"] for row in pairs)


@pytest.mark.slow
@pytest.mark.full  # test_a_series_that_is_done_is_skipped... has the same chain without training
def test_two_real_runs_of_which_the_second_trains_the_first_one_s_model(
    local_home: Path, trained_inputs: dict[str, Path], tmp_path: Path
) -> None:
    broken = tmp_path / "broken.jsonl"  # after the records that are read before a run begins
    broken.write_text('{"text": "the red fox"}\n' * 300 + "{no JSON\n")
    common: dict[str, Any] = {
        "target": "local",
        "data": {"path": trained_inputs["text"]},
        "train": {
            "steps": 4,
            "global_batch_size": 8,
            "seq_len": 32,
            "precision": "fp32",
            "lr": 3e-3,
        },
        "generate": {"prompts": ["the red fox"], "max_new_tokens": 4},
    }
    first = {**common, "name": "real-one", "model": {"path": trained_inputs["model"]}}
    second = {**common, "name": "real-two", "model": {"path": "run://real-one"}}
    third = {**second, "name": "real-three", "data": {"path": broken}}
    said: list[str] = []
    with pytest.raises(smtrain.JobError, match=r"in run real-three .config 3.; the same call"):
        smtrain.run([first, second, third], say=said.append)
    one, two = smtrain.run([first, second], say=said.append)
    assert all(result.skipped for run in (one, two) for result in run.results)
    assert two.loss[0] < one.loss[0] - 0.1
    card = two.job("export").read("README.md").decode()
    assert f"run real-one exported (job {one.job('export').name})" in card
