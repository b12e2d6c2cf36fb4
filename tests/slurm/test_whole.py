"""Whole runs on a real Slurm, held against this machine: the same losses, whoever is killed on the way.

`SMTRAIN_SLURM_KILLS=20` is the size of issue 16; `SMTRAIN_SLURM_SEED` chooses moments and victims.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import yaml

import smtrain
from smtrain.checkpoint.summary import verify
from smtrain.config.cluster import Cluster
from smtrain.handle.job import Job
from smtrain.handle.listing import list_jobs
from smtrain.slurm.place import SlurmPlace
from tests.job.processes import parent, ranks
from tests.slurm.conftest import wait_for
from tests.slurm.daemons import Slurm

pytestmark = pytest.mark.slow

KILLS = int(os.environ.get("SMTRAIN_SLURM_KILLS", "1"))
SEED = int(os.environ.get("SMTRAIN_SLURM_SEED", "1"))
STEPS = 8 + 6 * KILLS


class Site:
    """A shared folder of one Slurm, and a config that runs there."""

    def __init__(self, slurm: Slurm, folder: Path, inputs: dict[str, Path]) -> None:
        self.slurm, self.shared = slurm, folder / "shared"
        self.shared.mkdir()
        self.cluster = {"shared": str(self.shared), "venv": sys.prefix, "restarts": 100}
        self.place = SlurmPlace(Cluster(**self.cluster))
        self.config = {
            "name": "slurm-whole",
            "target": "slurm",
            "cluster": self.cluster,
            "model": {"path": str(inputs["model"]), "init": "scratch"},
            "data": {"path": str(inputs["text"])},
            "parallel": {"tp": 2, "pp": 1, "micro_batch_size": 2},
            "train": {
                "engine": "native", "steps": STEPS, "global_batch_size": 8, "seq_len": 32, "precision": "fp32",
                "lr": 1e-3, "warmup_steps": 2, "save_interval": 3,
            },
            "generate": {"prompts": ["the red"], "max_new_tokens": 2},
            "compute": {"instance_type": "ml.c5.xlarge", "instance_count": 2, "processes_per_instance": 2},
        }  # fmt: skip

    def job(self, stage: str, run: str = "slurm-whole") -> Job:
        return next(job for job in list_jobs(self.place, name_contains=f"{run}-{stage}-"))

    def ended(self, job: Job) -> str:
        return str(wait_for(lambda: status if (status := job.status) in ("Completed", "Failed", "Stopped") else None))


@pytest.fixture(scope="module")
def site(daemons: Slurm, local_home: Path, trained_inputs: dict[str, Path], tmp_path_factory: pytest.TempPathFactory):  # type: ignore[no-untyped-def]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLURM_CONF", str(daemons.conf))
        yield Site(daemons, tmp_path_factory.mktemp("site"), trained_inputs)


@pytest.fixture(scope="module")
def chain(site: Site) -> dict[str, Job]:
    """A run whose client was killed as soon as it had submitted the last stage."""
    path = site.shared.parent / "whole.yaml"
    path.write_text(yaml.safe_dump(site.config))
    command = [sys.executable, "-m", "smtrain", "run", str(path), "--wait", "--plain"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as client:
        try:
            assert client.stdout
            seen = list(itertools.takewhile(lambda line: not line.startswith("[4/4]"), client.stdout))
            assert len(seen) == 3, "".join(seen)
        finally:
            client.kill()
    jobs = {stage: site.job(stage) for stage in ("prepare", "train", "export", "generate")}
    assert jobs["generate"].status == "InProgress"
    return jobs


def records(metrics: bytes) -> dict[int, tuple[float, float]]:
    """Loss and gradient norm of every step, unrounded; of a step that was trained twice the last."""
    return {record["step"]: (record["loss"], record["grad_norm"]) for record in map(json.loads, metrics.splitlines())}


def metrics_of(job: Job) -> dict[int, tuple[float, float]]:
    return records(job.target.read(job.output.removesuffix("model/") + "data/metrics.jsonl"))


def test_a_chain_goes_on_without_its_client_to_an_exported_model(site: Site, chain: dict[str, Job]) -> None:
    assert site.ended(chain["export"]) == "Completed", chain["train"].explain()
    assert chain["train"].status == chain["prepare"].status == "Completed"
    folder = chain["export"].download(site.shared.parent / "model")
    verify(folder)
    assert (folder / "config.json").is_file()
    assert set(metrics_of(chain["train"])) == set(range(1, STEPS + 1))


def test_a_run_that_is_done_is_not_submitted_again(site: Site, chain: dict[str, Job]) -> None:
    site.ended(chain["generate"])
    told: list[str] = []
    run = smtrain.run(site.config, say=told.append)
    assert [result.skipped for result in run.results] == [True] * 4
    assert all("done before by" in line for line in told if line.startswith("[")), told
    assert len(run.loss) == STEPS


def test_losses_are_those_of_this_machine_bit_for_bit(site: Site, chain: dict[str, Job]) -> None:
    site.ended(chain["train"])
    prepared = chain["prepare"].output.removeprefix("file://")
    here = {k: v for k, v in site.config.items() if k != "cluster"}
    config = {**here, "target": "local", "data": {"prepared": prepared}}
    job = smtrain.launch(config, say=lambda _: None)
    assert metrics_of(job) == metrics_of(chain["train"])


def queued(site: Site, job: Job) -> str:
    """The ID of a job that has not ended."""
    return str(wait_for(lambda: site.place.queued_id(job.name)))


def reached(job: Job) -> int:
    return max((int(record["step"]) for record in job.records if "loss" in record), default=0)


def with_environment(*words: str) -> list[int]:
    """Processes that were started with all these variables."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                if {word.encode() for word in words} <= set((entry / "environ").read_bytes().split(b"\0")):
                    found.append(int(entry.name))
    return found


def kill_rank(site: Site, job: Job, chance: random.Random) -> bool:
    alive = ranks(with_environment(f"TRAINING_JOB_NAME={job.name}"))
    with suppress(ProcessLookupError):
        if alive:
            os.kill(chance.choice(alive), signal.SIGKILL)
    return bool(alive)


def time_wall(site: Site, job: Job, _: random.Random) -> bool:
    """What Slurm sends before the time limit, at once."""
    site.slurm.run("scancel", "--batch", "--signal=USR1", queued(site, job))
    return True


def requeue(site: Site, job: Job, _: random.Random) -> bool:
    site.slurm.run("scontrol", "requeue", queued(site, job))
    return True


def kill_node(site: Site, job: Job, chance: random.Random) -> bool:
    """A node as good as switched off until Slurm has given it up: its slurmd and all that it runs are gone."""
    node = chance.choice(site.slurm.nodes[:2])
    site.slurm.kill(node)
    ours = {*with_environment(f"TRAINING_JOB_NAME={job.name}", f"SLURMD_NODENAME={node}"), *batch_scripts(node)}
    for pid in {*ours, *filter(is_step, map(parent, ours))}:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    try:
        wait_for(lambda: "down" in site.slurm.run("sinfo", "-h", "-N", "-n", node, "-o", "%T"))
    finally:
        site.slurm.start_node(node)
    return True


def batch_scripts(node: str) -> list[int]:
    """Shells of batch scripts on a node, as they lie in its spool folder."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                words = (entry / "cmdline").read_bytes().split(b"\0")
                if any(f"/spool-{node}/".encode() in word and word.endswith(b"/slurm_script") for word in words):
                    found.append(int(entry.name))
    return found


def is_step(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"slurmstepd")
    return False


def kill_controller(site: Site, job: Job, _: random.Random) -> bool:
    site.slurm.wait_saved(queued(site, job))
    site.slurm.kill("slurmctld")
    site.slurm.start_controller()
    return True


FAULTS: list[Callable[[Site, Job, random.Random], bool]] = [time_wall, kill_rank, requeue, kill_node, kill_controller]


def test_a_run_that_is_killed_again_and_again_trains_as_if_it_had_not_been(site: Site, chain: dict[str, Job]) -> None:
    site.ended(chain["train"])
    chance = random.Random(SEED)
    prepared = chain["prepare"].output.removeprefix("file://")
    config = {**site.config, "name": "killed", "data": {"prepared": prepared}}
    job = smtrain.launch(config, wait=False, say=lambda _: None)
    done = 0
    while done < KILLS:
        # On from a step behind the last checkpoint of an earlier attempt, so that every attempt gets on.
        at = min(STEPS - 2, 4 + 6 * done + chance.randrange(4))
        wait_for(lambda at=at: job.status != "InProgress" or reached(job) >= at)
        assert job.status == "InProgress", job.explain()
        fault = FAULTS[done] if done < len(FAULTS) else chance.choice(FAULTS)
        print(f"{time.strftime('%T')} step {reached(job)}: {fault.__name__}", flush=True)
        done += fault(site, job, chance)
    assert site.ended(job) == "Completed", job.explain()
    killed = metrics_of(job)
    assert killed == metrics_of(chain["train"])
