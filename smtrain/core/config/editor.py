"""The schema of a config as editors read it, shipped as a file."""

from __future__ import annotations

import json
from pathlib import Path

from smtrain.core.config.schema import JobConfig

FILE = Path(__file__).with_name("smtrain.schema.json")
"""Made by scripts/config-reference."""


def schema_text() -> str:
    """The JSON Schema of a config, as `FILE` holds it."""
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **JobConfig.model_json_schema()}
    return json.dumps(schema, indent=2) + "\n"
