"""Files generated from the schema are up to date, and every key has a description."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pydantic
import pytest

from smtrain.core.config import JobConfig
from smtrain.core.config.schema import FILE, schema_text

ROOT = Path(__file__).parents[3]


@pytest.mark.skipif(
    [int(part) for part in pydantic.VERSION.split(".")[:2]] < [2, 12],
    reason=(
        "an older pydantic spells the same schema in other words (0.0 for 0, allOf about a"
        " reference)"
    ),
)
def test_the_reference_page_and_the_shipped_schema_are_up_to_date() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "scripts/config-reference", "--check"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, (
        f"{done.stdout}{done.stderr}\nrun scripts/config-reference and commit the result"
    )
    assert FILE.read_text("utf-8") == schema_text()


def test_every_key_has_a_sentence_on_the_page() -> None:
    schema = JobConfig.model_json_schema()
    page = (ROOT / "docs/reference/config.md").read_text("utf-8")
    for name, section in {"": schema, **schema["$defs"]}.items():
        for key, about in section["properties"].items():
            described = (
                about.get("description")
                or schema["$defs"][about["$ref"].rpartition("/")[2]]["description"]
            )
            assert described.rstrip().endswith("."), f"{name}.{key}: {described}"
            assert (
                re.sub(
                    r"\(smtrain help ([\w-]+)\)", r"([\1](../\1.md))", " ".join(described.split())
                )
                .replace("|", "\\|")
                .replace("<", "&lt;")
                .replace("][", "]\\[")
                in page
            ), f"{name}.{key}"


def test_every_key_has_an_address_on_the_page_and_no_page_is_named_without_a_link() -> None:
    page = (ROOT / "docs/reference/config.md").read_text("utf-8")
    schema = JobConfig.model_json_schema()
    keys = [*schema["properties"], "train.lr", "data.near_duplicates.similarity"]
    sections = {key for key in keys if f"## {key}\n" in page}
    for key in set(keys) - sections:
        assert f'<a id="{key}" href="#{key}">`{key.rpartition(".")[2]}`</a>' in page
    assert "docs/" not in page
    assert page.index("## At the top") < page.index("by hand"), "for maintainers: at the end"
