"""The keys of a config that a report shows first: those that differ from their defaults."""

from __future__ import annotations

from smtrain.core.config.schema import JobConfig
from smtrain.tools.report.changed_keys import changed_keys

WRITTEN = {
    "name": "a",
    "model": {"path": "demo://tiny-llama"},
    "data": {"path": "/text", "format": "text"},
    "train": {"steps": 7, "adapter": {"rank": 4}, "betas": [0.9, 0.99]},
    "tags": {"team": "x"},
}


def test_a_config_with_every_default_has_the_keys_that_were_written() -> None:
    whole = JobConfig.model_validate(WRITTEN).model_dump(mode="json")
    assert len(whole["train"]) > 20
    assert changed_keys(whole) == WRITTEN


def test_a_section_that_is_on_with_its_defaults_stays() -> None:
    config = {**WRITTEN, "train": {"adapter": {}}}
    whole = JobConfig.model_validate(config).model_dump(mode="json")
    assert changed_keys(whole)["train"] == {"adapter": {}}
    whole = JobConfig.model_validate({**WRITTEN, "train": {}}).model_dump(mode="json")
    assert "train" not in changed_keys(whole)
