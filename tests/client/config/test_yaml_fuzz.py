"""Any YAML text, in a file and behind `--set`: a config or sentences, never another error, and
within a second.

`SMTRAIN_EXAMPLES=50 pytest tests/client/config/test_yaml_fuzz.py` tries 20,000 of each kind.
"""

from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from smtrain import ConfigError, load_config
from smtrain.core.yaml_text import YamlError, parse
from tests.client.config.yaml_texts import ASSIGNMENTS, TEXTS
from tests.tiers import examples

MORE = int(os.environ.get("SMTRAIN_EXAMPLES", "1"))
TRIES = examples(400) * MORE


@pytest.fixture(scope="module")
def start() -> str:
    """A valid config, as the first lines of every text."""
    load_config(model={"path": "demo://tiny-llama"})  # so that no text pays for the imports
    return yaml.safe_dump(
        {"model": {"path": "demo://tiny-llama"}, "data": {"path": "demo://python-stdlib"}}
    )


def tried(source: Any, set_: tuple[str, ...] = ()) -> float:
    """CPU seconds that a text took. Fails for any error but a `ConfigError` of short lines."""
    begun = time.process_time()
    try:
        load_config(source, set_=set_)
    except ConfigError as error:
        for fault in error.faults:
            assert "\n" not in fault, fault
            assert len(fault) < 1500, fault
            assert "Traceback" not in fault
    return time.process_time() - begun


@settings(max_examples=TRIES, deadline=None, suppress_health_check=list(HealthCheck))
@given(text=TEXTS, alone=st.booleans())
def test_any_file_is_a_config_or_sentences(
    tmp_path_factory: Any, start: str, text: str, alone: bool
) -> None:
    path = Path(tmp_path_factory.getbasetemp()) / "fuzz.yaml"
    path.write_bytes((text if alone else start + text).encode("utf-8", "surrogatepass"))
    assert tried(path) < 10, "a few bytes must not grow without end"


@settings(max_examples=TRIES, deadline=None, suppress_health_check=list(HealthCheck))
@given(text=ASSIGNMENTS)
def test_any_set_is_a_config_or_sentences(start: str, text: str) -> None:
    assert tried(yaml.safe_load(start), (text,)) < 10, "a few bytes must not grow without end"


@settings(max_examples=TRIES, deadline=None, suppress_health_check=list(HealthCheck))
@given(text=TEXTS)
def test_what_both_take_is_what_the_safe_loader_says(text: str) -> None:
    """But for what is otherwise on purpose: dates and keys are texts, and so is a scalar with the
    tag `!`, as YAML 1.2 says and PyYAML does not do.
    """
    if re.search(r"(^|[\s,\[{:-])!(?=[\s,\]}]|$)", text):
        return
    try:
        ours = parse(text)
    except YamlError:
        return
    try:
        theirs = yaml.load(text, _Texts)
    except yaml.composer.ComposerError:  # of a name given twice, which YAML 1.2 allows
        return
    assert json.dumps(ours, sort_keys=True) == json.dumps(theirs, sort_keys=True)


class _Texts(yaml.SafeLoader):
    """yaml's own, with dates and `=` as texts."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        self.flatten_mapping(node)
        return {key.value: self.construct_object(value, deep=True) for key, value in node.value}


for _name in ("timestamp", "value", "merge"):
    _Texts.add_constructor(f"tag:yaml.org,2002:{_name}", lambda self, node: node.value)  # type: ignore[no-untyped-call]
