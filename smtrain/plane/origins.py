"""The paths that inputs of local jobs were uploaded from: no other machine can read the S3 of this one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from smtrain.core.files import home


def note(origins: Mapping[str, str]) -> None:
    """Keep from which path or demo:// URI each s3:// prefix was uploaded; the last one counts."""
    before = known()
    lines = [json.dumps({uri: path}) for uri, path in origins.items() if before.get(uri) != path]
    if lines:
        with _file().open("a", encoding="utf-8") as file:
            file.write("".join(f"{line}\n" for line in lines))


def known() -> dict[str, str]:
    """Every s3:// prefix that was noted, with the path it was uploaded from."""
    found: dict[str, str] = {}
    try:
        lines = _file().read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return {}
    for line in lines:
        with suppress(ValueError, TypeError):  # a line that another process has not written to its end
            found |= {str(uri): str(path) for uri, path in dict(json.loads(line)).items()}
    return found


def _file() -> Path:
    return home() / "origins.jsonl"
