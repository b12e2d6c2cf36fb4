"""Sum up the parts of `scripts/test --full`: what ran, what was skipped and why.

`python -m tests.summary FOLDER`.
"""

from __future__ import annotations

import collections
import re
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Part:
    """The results that pytest's --junitxml kept of one part."""

    name: str
    seconds: float = 0.0
    passed: int = 0
    failed: list[str] = field(default_factory=list)
    skipped: collections.Counter[str] = field(default_factory=collections.Counter)

    @classmethod
    def read(cls, file: Path) -> Part:
        part = cls(file.stem)
        for suite in ElementTree.parse(file).getroot().iter("testsuite"):
            part.seconds += float(suite.get("time", 0))
        for case in ElementTree.parse(file).getroot().iter("testcase"):
            skipped = case.find("skipped")
            if case.find("failure") is not None or case.find("error") is not None:
                part.failed.append(f"{case.get('classname')}::{case.get('name')}")
            elif skipped is not None:
                part.skipped[re.sub(r"\s+", " ", skipped.get("message", ""))] += 1
            else:
                part.passed += 1
        return part


def lines(parts: Iterable[Part]) -> Iterator[str]:
    """A row for each part, then a row for each reason of a skip, then the failures."""
    parts = list(parts)
    yield f"{'part':<20} {'seconds':>8} {'passed':>7} {'failed':>7} {'skipped':>8}"
    for part in parts:
        yield (
            f"{part.name:<20} {part.seconds:8.0f} {part.passed:7} {len(part.failed):7}"
            f" {part.skipped.total():8}"
        )
    for part in parts:
        for reason, count in part.skipped.most_common():
            yield f"skipped in {part.name}: {count} x {reason}"
    for part in parts:
        yield from (f"FAILED in {part.name}: {name}" for name in part.failed)
    passed, failed, skipped = (
        sum(count)
        for count in zip(
            *((p.passed, len(p.failed), p.skipped.total()) for p in parts), strict=True
        )
    )
    yield f"{passed} passed, {failed} failed, {skipped} skipped"


def main(folder: str) -> int:
    """Print the summary; the status is 1 if a test failed or no part left results."""
    parts = [Part.read(file) for file in sorted(Path(folder).glob("*.xml"))]
    if not parts:
        print(f"{folder}: holds no results; run scripts/test --full")
        return 1
    print("\n".join(lines(parts)))
    return int(any(part.failed for part in parts))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:2]))
