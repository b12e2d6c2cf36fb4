"""docs/architecture.md names what there is: every package, and the modules of the packages that it lists in full."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
LAYOUT = (ROOT / "docs/architecture.md").read_text("utf-8").partition("## The layout")[2].partition("\n## ")[0]


def sections() -> dict[str, str]:
    """What the layout says of each package, and of the modules beside them ("")."""
    found: dict[str, str] = {"": ""}
    package = ""
    for line in LAYOUT.splitlines():
        if match := re.match(r"  (\w+)/ ", line):
            package = match[1]
        elif re.match(r"  \w", line):
            package = ""
        found[package] = found.get(package, "") + line + "\n"
    return found


def test_every_package_and_module_is_in_the_layout() -> None:
    told = sections()
    packages = {path.parent.name for path in (ROOT / "smtrain").glob("*/__init__.py")}
    assert packages == set(told) - {""}
    whole = {
        "planner",
        "job",
        "local",
        "follow",
        "comparison",
        "data",
        "model",
        "checkpoint",
        "train",
        "config",
        "report",
    }
    lost = [
        f"{path.parent.name}/{path.name}"
        for path in (ROOT / "smtrain").glob("*/*.py")
        if path.parent.name in whole and not path.name.startswith("_") and path.name not in told[path.parent.name]
    ]
    assert not lost, "docs/architecture.md does not name them"
    names = set(re.findall(r"\b(\w+\.py)\b", LAYOUT))
    gone = names - {path.name for path in (ROOT / "smtrain").rglob("*.py")}
    assert not gone, "docs/architecture.md names what there is not"
