"""`smtrain cluster network | template`: the files of a config's cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from smtrain.cli.dispatch import call


@pytest.mark.parametrize(
    ("of_config", "flag", "region"),
    [
        (None, [], "us-west-2"),
        ("eu-north-1", [], "eu-north-1"),
        ("eu-north-1", ["--region", "us-east-2"], "us-east-2"),
    ],
)
def test_the_cluster_is_in_the_region_of_the_config(
    raw: dict[str, Any],
    tmp_path: Path,
    capsys: Any,
    monkeypatch: pytest.MonkeyPatch,
    of_config: str | None,
    flag: list[str],
    region: str,
) -> None:
    for name in ("AWS_REGION", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    raw |= {"target": "slurm", "cluster": {"shared": "/fsx/smtrain"}}
    raw["compute"] = {
        "instance_type": "ml.trn1.32xlarge",
        "region": of_config,
        "processes_per_instance": 4,
    }
    raw["train"] |= {"engine": "nxd", "precision": "bf16"}
    raw["parallel"] = {"tp": 2, "pp": 2, "sequence_parallel": True}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(raw))
    assert (
        call("cluster", "smtrain.cli.cluster", ["template", str(tmp_path / "run.yaml"), *flag]) == 0
    )
    out, err = capsys.readouterr()
    assert yaml.safe_load(out)["Region"] == region
    assert f"--region {region} " in err
    del raw["cluster"], raw["target"]
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(raw))
    assert (
        call("cluster", "smtrain.cli.cluster", ["network", str(tmp_path / "run.yaml"), *flag]) == 0
    )
    out, err = capsys.readouterr()
    assert yaml.safe_load(out)["Resources"]["NatGateway"]["Type"] == "AWS::EC2::NatGateway"
    assert err.count(f"--region {region} ") == 7, (
        "one for each command, and for each of two in another"
    )


def test_a_config_without_a_region_takes_that_of_the_environment(
    raw: dict[str, Any], tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_REGION", "eu-west-1")
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(raw))
    assert call("cluster", "smtrain.cli.cluster", ["network", str(tmp_path / "run.yaml")]) == 0
    assert "--region eu-west-1 " in capsys.readouterr().err
