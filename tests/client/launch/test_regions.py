"""compute.fallback_regions: the train stage runs in the cheapest region with machines and quota, and
nothing stays in the regions that refused it.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

import smtrain
from smtrain.client.backends.sagemaker.backend import SageMakerBackend
from smtrain.client.jobs.listing import list_jobs
from testing.plane import Plane

KIND = "ml.g5.12xlarge"
HOME, NORTH, WEST, SOUTH = "us-east-1", "eu-north-1", "us-west-2", "ap-south-1"
ROW = (
    '[[rows]]\ntype = "{}"\noption = "on_demand"\nregion = "{}"\ndollars_per_hour = {}\n'
    'date = "2026-11-27"\nsource = "test"\n'
)


def place(region: str) -> SageMakerBackend:
    return SageMakerBackend("local", region, is_fallback=region != HOME)


def objects(region: str) -> list[str]:
    """The keys in the default bucket of a region."""
    target = place(region)
    try:
        return [item["Key"] for item in target.listing(f"s3://{target.default_bucket()}/")]
    except smtrain.JobError:
        return []


def jobs(region: str, config: dict[str, Any]) -> list[smtrain.Job]:
    return list_jobs(place(region), name_contains=config["name"], limit=100)


@pytest.fixture
def config(
    raw: dict[str, Any], local_home: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> dict[str, Any]:
    """A train stage on tokens in the home region, whose job fails once it has machines; the
    regions' prices rise in the order north, west, home, south.
    """
    prices = tmp_path / "prices.toml"
    prices.write_text(
        "".join(
            ROW.format(KIND, region, dollars)
            for region, dollars in ((NORTH, 1.0), (WEST, 2.0), (HOME, 3.0), (SOUTH, 4.0))
        )
    )
    monkeypatch.setattr("smtrain.client.launch.regions.own_prices", lambda: prices)
    raw["model"]["init"] = "scratch"
    name = f"r{time.time_ns()}"
    place(HOME).s3.put_object(
        Bucket="smtrain-local", Key=f"{name}/manifest.json", Body=b"{}" + b" " * 1000
    )
    return {
        **raw,
        "name": name,
        "target": "local",
        "data": {"prepared": f"s3://smtrain-local/{name}/"},
        "compute": {
            **raw["compute"],
            "instance_type": KIND,
            "fallback_regions": [NORTH, WEST, SOUTH],
        },
    }


def launch(config: dict[str, Any], said: list[str], **more: Any) -> smtrain.Job:
    return smtrain.launch(config, wait=False, say=said.append, **more)


def test_the_run_lands_in_the_cheapest_region_that_has_room(
    config: dict[str, Any], plane: Plane
) -> None:
    """No machines in two regions, quota 0 in a third; the dearest takes the job."""
    plane.no_capacity(KIND, region=NORTH)
    plane.no_capacity(KIND, region=HOME)
    plane.quota(f"{KIND} for training job usage", 0, region=WEST)
    said: list[str] = []
    job = launch(config, said)
    assert job.target.region_name() == SOUTH
    text = "\n".join(said)
    order = [line.split(":")[0] for line in said if line[:3] in ("1. ", "2. ", "3. ", "4. ")]
    assert order == [f"1. {NORTH}", f"2. {WEST}", f"3. {HOME}", f"4. {SOUTH}"]
    assert f"1. {NORTH}: 1.00 $/h a machine, $" in text
    assert " for training, $0.00 to copy 1.0 kB there" in text
    assert said.index(next(line for line in said if line.startswith("copying"))) > 3
    assert f"{NORTH}: no {KIND}; " in text
    assert f"{WEST}: the quota '{KIND} for training job usage' is 0, and the run takes 2" in text
    assert smtrain.Job(job.name).target == job.target, "found by its name"
    assert said[-1] == f"{job.name} runs in {SOUTH}, the cheapest region that has room"
    uris = [
        channel["DataSource"]["S3DataSource"]["S3Uri"]
        for channel in job.describe()["InputDataConfig"]
    ]
    assert all(uri.startswith(f"s3://smtrain-local-{SOUTH}/") for uri in uris)
    assert any(
        key.endswith(f"copies/smtrain-local/{config['name']}/manifest.json")
        for key in objects(SOUTH)
    )
    assert objects(NORTH) == objects(WEST) == []
    for region, count in ((NORTH, 1), (WEST, 0), (HOME, 1), (SOUTH, 1)):
        assert len(jobs(region, config)) == count, region
    assert not any(job.known_running for region in (NORTH, HOME) for job in jobs(region, config))


def test_the_same_command_finds_the_run_in_its_region(config: dict[str, Any], plane: Plane) -> None:
    plane.quota(f"{KIND} for training job usage", 0, region=NORTH)
    said: list[str] = []
    first = launch(config, said)
    plane.calm()  # the cheaper region has room now
    again = launch(config, said)
    assert {first.target.region_name(), again.target.region_name()} == {WEST}
    assert jobs(NORTH, config) == jobs(HOME, config) == []


def test_without_room_anywhere_the_regions_are_named(config: dict[str, Any], plane: Plane) -> None:
    plane.no_capacity(KIND)
    before = [objects(region) for region in (NORTH, WEST, SOUTH)]
    with pytest.raises(
        smtrain.JobError,
        match=rf"no region had {KIND} and quota for it \({NORTH}, {WEST}, {HOME}, {SOUTH}\)",
    ):
        launch(config, [])
    assert [objects(region) for region in (NORTH, WEST, SOUTH)] == before
