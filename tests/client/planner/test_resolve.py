"""A config is loaded once by a command, however many calls take it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import smtrain
from smtrain import cli
from smtrain.client.config.load import draft
from smtrain.client.planner import resolve
from smtrain.client.planner.resolve import load_config, with_tags
from smtrain.core.errors import ConfigError

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
ON_AWS = (
    "compute.role=arn:aws:iam::123456789012:role/r",
    "output.s3_uri=s3://my-bucket/x",
    "compute.region=us-west-2",
    "model.path=s3://my-bucket/model",
)


@pytest.fixture
def drafts(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """One entry for each time that a config is drafted from its sources."""
    made: list[object] = []

    def counted(*args: Any, **keywords: Any) -> object:
        made.append(args)
        return draft(*args, **keywords)

    monkeypatch.setattr(resolve, "draft", counted)
    return made


@pytest.mark.parametrize("command", ["run", "launch"])
@pytest.mark.parametrize("target", ["aws", "local"])
def test_a_dry_run_loads_its_config_once(
    command: str, target: str, drafts: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    example = EXAMPLES / ("llama-2-70b-trn1.yaml" if target == "aws" else "tiny-llama.yaml")
    set_ = [word for one in ON_AWS if target == "aws" for word in ("--set", one)]
    monkeypatch.setattr(
        "sys.argv", ["smtrain", command, str(example), "--target", target, "--dry-run", *set_]
    )
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert not ended.value.code
    assert len(drafts) == 1


def test_a_loaded_config_passes_through_unless_something_is_changed(drafts: list[object]) -> None:
    config = load_config(EXAMPLES / "tiny-llama.yaml")
    assert load_config(config) is config
    assert load_config(config, target=config.target) is config
    tagged = with_tags(config, team="a")
    assert load_config(tagged) is tagged
    smtrain.request(config, stage="prepare")
    assert len(drafts) == 1
    assert load_config(config, set_=["train.seed=7"]).train.seed == 7
    assert len(drafts) == 2


def test_a_config_that_was_changed_in_memory_is_looked_at_again() -> None:
    config = load_config(EXAMPLES / "tiny-llama.yaml")
    changed = config.model_copy(update={"parallel": config.parallel.model_copy(update={"tp": 3})})
    with pytest.raises(ConfigError, match="tp"):
        load_config(changed)
