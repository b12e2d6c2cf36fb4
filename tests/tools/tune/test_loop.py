"""Trials on the local control plane: the best one, resuming, and a container of a tuning job with
the same values.
"""

from __future__ import annotations

import json
import stat
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import smtrain
from smtrain.client.backends.sagemaker.backend import SageMakerBackend
from smtrain.client.jobs.listing import jobs_of, list_jobs
from smtrain.client.launch.inputs import upload_all
from smtrain.client.launch.stages import Chain
from smtrain.tools.tune.managed import tuning_request

pytestmark = pytest.mark.slow

# What the sagemaker-training toolkit does with a script: unpack it, give it the hyperparameters,
# and become it.
TOOLKIT = """#!{python}
import json, os, sys, tarfile
ml = os.environ.get("SMTRAIN_ML_ROOT", "/opt/ml")
parameters = json.load(open(ml + "/input/config/hyperparameters.json"))
given = {{key: json.loads(value) for key, value in parameters.items() if key.startswith("sagemaker_")}}
tarfile.open(given["sagemaker_submit_directory"].replace("/opt/ml", ml)).extractall(ml + "/code", filter="data")
os.chdir(ml + "/code")
words = [word for key, value in parameters.items() if key not in given for word in ("--" + key, value)]
os.execv(sys.executable, [sys.executable, given["sagemaker_program"], *words])
"""


@pytest.fixture
def config(local_home: Path, trained_inputs: dict[str, Path]) -> dict[str, Any]:
    return {
        "name": f"tuned-{time.time_ns()}",
        "model": {"path": str(trained_inputs["model"]), "init": "scratch"},
        "data": {"path": str(trained_inputs["text"])},
        "compute": {"processes_per_instance": 1},
        "train": {
            "steps": 3,
            "global_batch_size": 2,
            "seq_len": 32,
            "precision": "fp32",
            "save_interval": 5,
            "validation": {"fraction": 0.1, "interval": 3},
        },
    }


@pytest.mark.full  # the gate has test_search.py, test_space.py and test_managed.py
def test_the_best_of_a_grid_after_an_interruption(config: dict[str, Any], tmp_path: Path) -> None:
    over, said = ["train.lr=1e-9,3e-3"], list[str]()

    def until_the_second(line: str) -> None:
        said.append(line)
        if line.startswith("trial 2:"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        smtrain.tune(config, over=over, parallel=2, say=until_the_second)
    said.clear()
    tuning = smtrain.tune(config, over=over, parallel=2, out=tmp_path / "out", say=said.append)
    assert [trial.status for trial in tuning.trials] == ["finished", "finished"], "\n".join(said)
    best = tuning.best
    assert best is not None
    assert (best.values, tuning.objective) == ({"train.lr": "3e-3"}, "val_loss")
    target = SageMakerBackend("local")
    assert len(jobs_of(target, config["name"], "prepare")) == 1, "the text is prepared once for all"
    for trial in tuning.trials:
        jobs = [job.name for job in list_jobs(target, name_contains=trial.run, limit=9)]
        assert jobs == [trial.job], "a trial that was interrupted is not begun again"
    assert str(tuning).splitlines()[1].startswith("*  2 ")
    written = smtrain.load_config(tmp_path / "out/best.yaml")
    assert (written.train.lr, written.name) == (3e-3, config["name"])
    assert json.loads((tmp_path / "out/trials.json").read_text())["best"] == 2
    assert {path.name for path in tuning.files} == {"best.yaml", "trials.json", "tuning.png"}
    before = len(list_jobs(target, limit=1000))
    again = smtrain.tune(config, over=over, parallel=2, say=said.append)
    assert again.trials == tuning.trials
    assert len(list_jobs(target, limit=1000)) == before, "nothing is left to do"


@pytest.mark.full
def test_a_tuning_jobs_container_trains_as_the_trial_of_the_same_values(
    config: dict[str, Any], tmp_path: Path
) -> None:
    """SageMaker's training job for a definition and chosen values."""
    over, said, target = ["train.lr=3e-3,1e-3"], list[str](), SageMakerBackend("local")
    tuning = smtrain.tune(config, over=over, parallel=2, say=said.append)
    best = tuning.best
    assert best is not None, "\n".join(said)
    chain = Chain(smtrain.load_config(config), target)
    planned = chain.plan("train")
    upload_all(target, list(planned.uploads), said.append)
    request = tuning_request(
        chain.config,
        planned.request,
        tuning.axes,
        "val_loss",
        max_jobs=2,
        parallel=1,
        early_stop=False,
    )
    definition = request["TrainingJobDefinition"]
    bin_ = tmp_path / "bin"
    bin_.mkdir()
    train = bin_ / "train"
    train.write_text(TOOLKIT.format(python=sys.executable))
    train.chmod(train.stat().st_mode | stat.S_IXUSR)
    trial_job = smtrain.Job(best.job, "local")
    sent = {
        **definition,
        "TrainingJobName": f"{config['name']}-aws",
        "HyperParameters": {
            **definition["StaticHyperParameters"],
            **best.values,
            "_tuning_objective_metric": "x",
        },
        "Environment": (
            definition["Environment"]
            | {"PATH": f"{bin_}:{Path(sys.executable).parent}:/usr/bin:/bin"}
        ),
    }
    del sent["StaticHyperParameters"]
    target.sagemaker.create_training_job(**sent)
    assert smtrain.Job(sent["TrainingJobName"], "local").wait().loss == trial_job.loss
    assert len(trial_job.loss) == 3
