"""The page for users of other tools names keys that a config has, and its config is one."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import smtrain
from tests.docs.pages import ROOT, blocks

PAGE = ROOT / "docs/coming-from.md"
SCHEMA = json.loads((ROOT / "smtrain/core/config/smtrain.schema.json").read_text("utf-8"))
TALK = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}


def is_key(name: str) -> bool:
    """Return whether a config has this key, such as `train.dpo.beta`."""
    section = SCHEMA
    for part in name.split("."):
        field = section.get("properties", {}).get(part)
        if field is None:
            return False
        refs = [one["$ref"] for one in (field, *field.get("anyOf", ())) if "$ref" in one]
        section = SCHEMA["$defs"][refs[0].rpartition("/")[2]] if refs else {}
    return True


def test_every_key_of_ours_exists() -> None:
    rows = [
        line.split("|")[1]
        for line in PAGE.read_text("utf-8").splitlines()
        if line.startswith("| `")
    ]
    named = [name for row in rows for name in re.findall(r"`([a-z_]+\.[a-z_0-9.]+)", row)]
    assert len(named) > 40
    assert [name for name in named if not is_key(name)] == []
    assert not is_key("train.dpo.bet")


def test_the_whole_config_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (text,) = (block.text for block in blocks(PAGE) if block.tag == "yaml")
    (tmp_path / "run.yaml").write_text(text, "utf-8")
    (tmp_path / "my-conversations").mkdir()
    (tmp_path / "my-conversations/a.jsonl").write_text(json.dumps(TALK))
    monkeypatch.chdir(tmp_path)
    assert smtrain.load_config("run.yaml").train.adapter is not None
