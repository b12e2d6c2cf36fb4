"""The paths that inputs of local jobs were uploaded from: no other machine can read this one's S3."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from smtrain.core.files import home


def note(origins: Mapping[str, str]) -> None:
    """Record the path or demo:// URI that each s3:// prefix was uploaded from; the last record counts."""
    before = known()
    lines = [json.dumps({uri: path}) for uri, path in origins.items() if before.get(uri) != path]
    if lines:
        with _file().open("a", encoding="utf-8") as file:
            file.write("".join(f"{line}\n" for line in lines))


def known() -> dict[str, str]:
    """The recorded paths by s3:// prefix."""
    origins: dict[str, str] = {}
    try:
        lines = _file().read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return {}
    for line in lines:
        with suppress(ValueError, TypeError):  # a line that another process is still writing
            origins |= {str(uri): str(path) for uri, path in dict(json.loads(line)).items()}
    return origins


def _file() -> Path:
    return home() / "origins.jsonl"
