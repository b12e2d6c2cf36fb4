"""A whole run on a real Slurm, from a laptop if sshd is installed, compared with this machine: the
same losses, even if processes are killed. Only in `scripts/test --slurm`, as they take some minutes
of both cores.

`SMTRAIN_SLURM_KILLS=20` is the size of issue 16; `SMTRAIN_SLURM_SEED` chooses moments and victims.
`SMTRAIN_SLURM_WALL=600` trains so many steps in attempts of two minutes.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

import smtrain
from smtrain.client.backends.slurm.backend import SlurmBackend
from smtrain.client.jobs.job import Job
from smtrain.client.jobs.listing import list_jobs
from smtrain.client.launch.stages import Chain
from smtrain.core.config.cluster import Cluster
from smtrain.tools.report.gather import gather
from smtrain.worker.checkpoint.summary import verify
from smtrain.worker.data.clean.cleaning import Cleaning
from smtrain.worker.data.manifest import DatasetManifest
from smtrain.worker.data.prepare.prepare import prepare
from smtrain.worker.data.prepare_options import PrepareOptions
from tests.client.backends.slurm import sshd
from tests.client.backends.slurm.conftest import PATIENCE, wait_for
from tests.client.backends.slurm.daemons import Slurm
from tests.client.backends.slurm.faults import FAULTS
from tests.processes import processes_of

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        os.environ.get("SMTRAIN_SLURM") != "required",
        reason="whole runs take minutes of both cores: scripts/test --slurm",
    ),
]

KILLS = int(os.environ.get("SMTRAIN_SLURM_KILLS", "1"))
SEED = int(os.environ.get("SMTRAIN_SLURM_SEED", "1"))
WALL = int(os.environ.get("SMTRAIN_SLURM_WALL", "0"))
STEPS = 20 + 40 * KILLS
STAGES = ("prepare", "train", "export", "generate")


class Site:
    """A shared folder of one Slurm, and a config that runs there."""

    def __init__(
        self, slurm: Slurm, folder: Path, inputs: dict[str, Path], host: str | None
    ) -> None:
        self.slurm, self.shared = slurm, folder / "shared"
        self.shared.mkdir()
        self.cluster = {
            "shared": str(self.shared),
            "venv": sys.prefix,
            "restarts": 100,
            "host": host,
        }
        self.place = SlurmBackend(Cluster(**self.cluster))
        self.config: dict[str, Any] = {
            "name": "slurm-whole",
            "target": "slurm",
            "cluster": self.cluster,
            "model": {"path": str(inputs["model"]), "init": "scratch"},
            "data": {"path": str(inputs["text"])},
            "parallel": {"tp": 2, "pp": 1, "micro_batch_size": 2},
            "train": {
                "engine": "native",
                "steps": STEPS,
                "global_batch_size": 8,
                "seq_len": 32,
                "precision": "fp32",
                "lr": 1e-3,
                "warmup_steps": 2,
                "save_interval": 5,
            },
            "generate": {"prompts": ["the red"], "max_new_tokens": 2},
            "compute": {
                "instance_type": "ml.c5.xlarge",
                "instance_count": 2,
                "processes_per_instance": 2,
            },
        }

    def job(self, stage: str, run: str = "slurm-whole") -> Job:
        return next(job for job in list_jobs(self.place, name_contains=f"{run}-{stage}-"))

    def ended(self, job: Job) -> str:
        def end() -> str | None:
            return status if (status := job.status) in ("Completed", "Failed", "Stopped") else None

        return str(
            wait_for(end, PATIENCE + 2 * WALL + 2 * STEPS)
        )  # two seconds a step, including faults


@pytest.fixture(scope="module")
def site(
    daemons: Slurm,
    local_home: Path,
    trained_inputs: dict[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("site")
    with pytest.MonkeyPatch.context() as patch, ExitStack() as opened:
        patch.setenv("SLURM_CONF", str(daemons.conf))
        by_ssh = sshd.lacking() is None
        if by_ssh:
            opened.enter_context(
                sshd.reached_by_ssh(folder / "sshd", {"SLURM_CONF": str(daemons.conf)})
            )
        yield Site(daemons, folder, trained_inputs, "head" if by_ssh else None)


@pytest.fixture(scope="module")
def chain(site: Site) -> dict[str, list[Job]]:
    """The jobs of each stage, oldest first, of a run whose client was killed after it had submitted
    the last stage, and whose training was stopped; it was then run again, with the faults of
    SMTRAIN_SLURM_KILLS.
    """
    path = site.shared.parent / "whole.yaml"
    path.write_text(yaml.safe_dump(site.config))
    command = [sys.executable, "-m", "smtrain", "run", str(path), "--plain"]
    with subprocess.Popen(
        [*command, "--wait"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as client:
        try:
            assert client.stdout
            seen = list(
                itertools.takewhile(lambda line: not line.startswith("[4/4]"), client.stdout)
            )
            headings = [line for line in seen if line.startswith("[")]
            assert len(headings) == 3, "".join(seen)
        finally:
            client.kill()
    first = {stage: site.job(stage) for stage in STAGES}
    wait_for(lambda: first["train"].status != "InProgress" or reached(first["train"]) >= 1)
    first["train"].stop()
    assert site.ended(first["train"]) == "Stopped", first["train"].explain()
    assert [site.ended(first[stage]) for stage in ("export", "generate")] == ["Stopped", "Stopped"]
    again = subprocess.run(command, capture_output=True, text=True)
    assert again.returncode == 0, again.stdout + again.stderr
    assert f"[1/4] prepare: done before by {first['prepare'].name}" in again.stdout
    jobs = {stage: [first[stage], site.job(stage)] for stage in STAGES}
    meet_with_faults(site, jobs["train"][-1], KILLS - 1)
    return jobs


def records(metrics: bytes) -> dict[int, tuple[float, float]]:
    """Loss and gradient norm of every step, unrounded; for a step that was trained twice the
    last.
    """
    return {
        record["step"]: (record["loss"], record["grad_norm"])
        for record in map(json.loads, metrics.splitlines())
    }


def metrics_of(*jobs: Job) -> dict[int, tuple[float, float]]:
    by_step: dict[int, tuple[float, float]] = {}
    for job in jobs:
        by_step |= records(
            job.target.read(job.output.removesuffix("model/") + "data/metrics.jsonl")
        )
    return by_step


def test_a_chain_goes_on_without_its_client_to_an_exported_model(
    site: Site, chain: dict[str, list[Job]]
) -> None:
    assert site.ended(chain["export"][-1]) == "Completed", chain["train"][-1].explain()
    assert chain["train"][-1].status == "Completed"
    folder = chain["export"][-1].download(site.shared.parent / "model")
    verify(folder)
    assert (folder / "config.json").is_file()


def test_a_report_holds_a_config_that_repeats_the_run(
    site: Site, chain: dict[str, list[Job]]
) -> None:
    site.ended(chain["generate"][-1])
    account = gather("slurm-whole")
    assert account.restarts >= 1
    again = Chain(smtrain.load_config(account.config), site.place)
    assert [again.base_name(stage) for stage in STAGES] == [
        chain[stage][0].name for stage in STAGES
    ]
    page = smtrain.report("slurm-whole", site.shared.parent / "page.html").read_text("utf-8")
    assert f"{account.records[-1]['loss']:.4f}" in page


def test_what_is_done_is_not_submitted_again(site: Site, chain: dict[str, list[Job]]) -> None:
    site.ended(chain["export"][-1])
    for stage in ("prepare", "train", "export"):
        assert (
            smtrain.launch(site.config, stage=stage, say=lambda _: None).name
            == chain[stage][-1].name
        )  # type: ignore[arg-type]


def test_losses_are_those_of_this_machine_bit_for_bit(
    site: Site, chain: dict[str, list[Job]]
) -> None:
    site.ended(chain["train"][-1])
    prepared = str(site.shared / chain["prepare"][-1].output.partition(f"{site.shared}/")[2])
    here = {k: v for k, v in site.config.items() if k != "cluster"}
    job = smtrain.launch(
        {**here, "target": "local", "data": {"prepared": prepared}}, say=lambda _: None
    )
    trained = metrics_of(*chain["train"])
    assert set(trained) == set(range(1, STEPS + 1))
    assert trained == metrics_of(job)


def reached(job: Job) -> int:
    return max((int(record["step"]) for record in job.records if "loss" in record), default=0)


def ended_or_at(job: Job, step: int) -> bool:
    return job.status != "InProgress" or reached(job) >= step


def meet_with_faults(site: Site, job: Job, kills: int) -> None:
    """Apply so many faults to one job, each after a step beyond the last checkpoint of the previous
    attempt.
    """
    chance, done, before = random.Random(SEED), 0, 0
    while done < kills:
        at = before + 6 + chance.randrange(5)
        wait_for(partial(ended_or_at, job, at))
        assert job.status == "InProgress", job.explain()
        fault = FAULTS[done] if done < len(FAULTS) else chance.choice(FAULTS)
        before = reached(job)
        print(f"{time.strftime('%T')} step {before}: {fault.__name__}", flush=True)
        done += fault(site.slurm, job, chance)
    if kills:
        assert site.ended(job) == "Completed", job.explain()


def test_a_printed_script_is_submitted_by_plain_sbatch(site: Site) -> None:
    path = site.shared.parent / "by-hand.yaml"
    path.write_text(yaml.safe_dump({**site.config, "name": "by-hand"}))
    words = [
        sys.executable,
        "-m",
        "smtrain",
        "launch",
        str(path),
        "--stage",
        "prepare",
        "--dry-run",
        "--upload",
    ]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (folder,) = re.findall(r"By hand: mkdir -p (\S+) && sbatch", done.stdout)
    Path(folder).mkdir(parents=True)
    script = site.shared.parent / "by-hand.sh"
    script.write_text(done.stdout)
    site.slurm.run("sbatch", str(script))
    job = site.job("prepare", "by-hand")
    assert site.ended(job) == "Completed", job.explain()


@pytest.mark.skipif(
    not WALL, reason="SMTRAIN_SLURM_WALL is not set: Slurm counts time limits in minutes"
)
def test_a_run_that_needs_several_time_limits_trains_as_if_there_was_none(site: Site) -> None:
    walls = {**site.cluster, "time": "3m", "save_before": 60}
    train = {**site.config["train"], "steps": WALL, "save_interval": WALL}  # type: ignore[dict-item]
    config = {**site.config, "name": "walled", "cluster": walls, "train": train}
    jobs = {
        result.stage: result.job
        for result in smtrain.run(config, wait=False, say=lambda _: None).results
    }
    assert site.ended(jobs["train"]) == "Completed", jobs["train"].explain()
    limits = [
        one
        for one in jobs["train"].describe()["SecondaryStatusTransitions"]
        if one["Status"] == "Interrupted"
    ]
    print(len(limits), "time limits came")
    assert limits, "it was done before a limit came: raise SMTRAIN_SLURM_WALL"
    assert all("time limit" in one["StatusMessage"] for one in limits)
    prepared = str(site.shared / jobs["prepare"].output.partition(f"{site.shared}/")[2])
    here = {k: v for k, v in config.items() if k != "cluster"}
    job = smtrain.launch(
        {**here, "target": "local", "data": {"prepared": prepared}}, say=lambda _: None
    )
    trained = metrics_of(jobs["train"])
    assert set(trained) == set(range(1, WALL + 1))
    assert trained == metrics_of(job)


def test_three_nodes_prepare_what_one_machine_does_and_resume_after_a_kill(
    site: Site, tmp_path: Path
) -> None:
    text = tmp_path / "text"
    text.mkdir()
    for number in range(3):
        rows = (
            json.dumps({"text": f"{'words of the text ' * 60} {number} {i % 4000}"}) + "\n"
            for i in range(9000)
        )
        (text / f"{number:02}.jsonl").write_text("".join(rows))
    config = {
        **site.config, "name": "slurm-nodes",
        "data": {"path": str(text), "machines": 3, "deduplicate": True, "shard_size": 0.009},
        "compute": {**site.config["compute"], "environment": {"SMTRAIN_SHARE_MB": "4.2"}},
    }  # fmt: skip
    job = smtrain.launch(config, stage="prepare", wait=False, say=lambda _: None)
    # A head that dies before it answers is started again without a word.
    wait_for(lambda: [*site.shared.rglob("cluster.json")] or job.status != "InProgress")
    driver = processes_of(job, b"/gcs_server")
    assert driver, job.explain()
    os.kill(driver[0], signal.SIGKILL)
    assert site.ended(job) == "Completed", job.explain()
    lines = [line.text for line in job.lines()]
    assert any("It is started again." in line for line in lines)
    assert {"algo-2", "algo-3"} <= {
        word for line in lines for word in line.split() if word.startswith("algo-")
    }
    there = job.download(tmp_path / "there")
    options = PrepareOptions(seq_len=32, cleaning=Cleaning(deduplicate=True), shard_bytes=9_000_000)
    model = Path(site.config["model"]["path"])
    prepare(text, tmp_path / "here", model, options, progress=lambda _: None, say=lambda _: None)
    assert DatasetManifest.load(there) == DatasetManifest.load(tmp_path / "here")
    for path in (tmp_path / "here").iterdir():
        assert (there / path.name).read_bytes() == path.read_bytes(), path.name
    assert not list(site.shared.rglob("share-*")), "shares are left"
