"""Where the entry scripts lie."""

from __future__ import annotations

from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2]


def entrypoints_folder() -> Path:
    """Beside the package in a checkout and in a job, inside it when installed."""
    inside = PACKAGE / "entrypoints"
    return inside if inside.is_dir() else PACKAGE.parent / "entrypoints"
