"""A hook of mkdocs: every page of the site shows the version in smtrain/version.py."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).resolve().parents[1] / "smtrain/version.py"


def version() -> str:
    """The version, parsed and not imported: the site is built without installing smtrain."""
    for node in ast.parse(SOURCE.read_text("utf-8")).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__version__":
            return str(ast.literal_eval(node.value))
    raise LookupError(f"{SOURCE} sets no __version__")


def on_config(config: Any) -> Any:
    config["copyright"] = f"smtrain {version()}"
    return config
