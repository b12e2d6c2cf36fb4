"""One Slurm for a test process, and jobs on it whose stage is a few lines of Python."""

from __future__ import annotations

import io
import itertools
import os
import subprocess
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from smtrain.client.backends.slurm.backend import SlurmBackend
from smtrain.client.jobs.job import Job
from smtrain.core.config.cluster import Cluster
from tests import processes
from tests.client.backends.slurm.daemons import Slurm, cannot, lacking

ROOT = Path(__file__).resolve().parents[4]
PATIENCE = int(os.environ.get("SMTRAIN_SLURM_PATIENCE", "600"))  # seconds: a machine may be full


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep tests of a real Slurm out of the gate, which is the same on every machine."""
    for item in items:
        if "daemons" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.full)


@pytest.fixture(scope="session")
def daemons(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    if reason := lacking():
        cannot(reason)
    slurm = Slurm(tmp_path_factory.mktemp("slurm"))
    try:
        try:
            slurm.start()
        except AssertionError as error:
            cannot(f"no Slurm can be started here: {error}")
        yield slurm
    finally:
        slurm.stop()


def wait_for(condition: Callable[[], Any], patience: float = PATIENCE) -> Any:
    return processes.wait_for(condition, patience, every=0.2)


class Bench:
    """Jobs of a cluster with a stage of the test's own, run by the real script and runner."""

    _numbers = itertools.count()

    def __init__(self, slurm: Slurm, shared: Path) -> None:
        self.slurm, self.shared = slurm, shared

    def place(self, **changes: Any) -> SlurmBackend:
        return SlurmBackend(Cluster(shared=str(self.shared), **changes))

    def request(
        self, program: str, *, stage: str = "train", hosts: int = 1, name: str | None = None
    ) -> dict[str, Any]:
        """A request whose bundle has the real runner, and this program instead of the launcher."""
        name = name or f"run-{stage}-{next(self._numbers):08x}"
        code = self.shared / "code" / name
        code.mkdir(parents=True)
        ours = {
            file: (ROOT / "entrypoints" / file).read_bytes()
            for file in ("slurm_node.py", "cluster_host.py", "s3_inputs.py")
        }
        with tarfile.open(code / "bundle.tar.gz", "w:gz") as archive:
            for file, content in {**ours, "launch.py": program.encode()}.items():
                entry = tarfile.TarInfo(f"entrypoints/{file}")
                entry.size = len(content)
                archive.addfile(entry, io.BytesIO(content))
        source = {"S3DataType": "S3Prefix", "S3Uri": f"file://{code}/"}
        return {
            "TrainingJobName": name,
            "HyperParameters": {"stage": stage},
            "InputDataConfig": [{"ChannelName": "code", "DataSource": {"S3DataSource": source}}],
            "OutputDataConfig": {"S3OutputPath": f"file://{self.shared}/run/jobs"},
            "ResourceConfig": {"InstanceType": "ml.c5.xlarge", "InstanceCount": hosts},
            "StoppingCondition": {"MaxRuntimeInSeconds": 3600},
            "CheckpointConfig": {"S3Uri": f"file://{self.shared}/run/checkpoints/{name}/"},
            "Environment": {},
        }

    def start(
        self, place: SlurmBackend, program: str, *, after: list[str] | None = None, **how: Any
    ) -> Job:
        request = self.request(program, **how)
        assert place.submit(request, after or [])
        return Job(request["TrainingJobName"], place)

    def ended(self, job: Job) -> dict[str, Any]:
        def over() -> dict[str, Any] | None:
            description = job.describe()
            return (
                description
                if description["TrainingJobStatus"] in ("Completed", "Failed", "Stopped")
                else None
            )

        return wait_for(over)  # type: ignore[no-any-return]


@pytest.fixture
def bench(daemons: Slurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.setenv("SLURM_CONF", str(daemons.conf))
    monkeypatch.setenv("SMTRAIN_HOME", str(tmp_path / "home"))
    (tmp_path / "shared").mkdir()
    return Bench(daemons, tmp_path / "shared")


@pytest.fixture
def small_disk(bench: Bench) -> Iterator[Path]:
    """The cluster's shared folder on a disk of 4 MiB."""
    made = ["mount", "-t", "tmpfs", "-o", "size=4m", "smtrain-test", str(bench.shared)]
    if subprocess.run(made, capture_output=True).returncode:
        cannot("no tmpfs can be mounted here")
    yield bench.shared
    subprocess.run(["umount", "--lazy", str(bench.shared)], check=True)
