"""Parts of `scripts/test --full`, and when each was last green.

python -m tests.parts files N           test files of part N, one a line
python -m tests.parts environments N    other environments whose tests belong to part N, one a line
python -m tests.parts green N           record that part N passed on the checked-out commit
python -m tests.parts stale             a line for each part whose last green run is too old, or unknown
"""

from __future__ import annotations

import datetime
import json
import subprocess
import sys
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / "tests/full-runs.json"
OF_FILES = 6
"""Parts with test files. The last one has only tests of other environments."""
PARTS = OF_FILES + 1
STALE = 300
"""Commits after which the gate warns that a part was not run."""
ENVIRONMENTS = {
    1: ("extra", "s3"),
    2: ("sdk-v2", "parallelcluster"),
    7: ("tf456", "tf457", "tf500", "nxd"),
}
"""Names of scripts/test for the tests that need packages that cannot be in the usual environment.
"""


def part_of(file: str) -> int:
    """Return the part, 1 to 6, of a test file (its path in the checkout).

    It depends on the name only.
    """
    return zlib.crc32(file.encode()) % OF_FILES + 1


def files(part: int) -> list[str]:
    """Return the test files of a part, sorted."""
    found = (path.relative_to(ROOT).as_posix() for path in (ROOT / "tests").rglob("test_*.py"))
    return sorted(file for file in found if part_of(file) == part)


def _git(*words: str) -> str | None:
    """Return what git prints, or None if it fails."""
    done = subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else None


def runs() -> dict[str, dict[str, str]]:
    """Return the recorded runs: {part: {"date", "commit"}}."""
    content: dict[str, dict[str, str]] = (
        json.loads(RECORD.read_text("utf-8")) if RECORD.exists() else {}
    )
    return content


def record(part: int) -> None:
    """Write today's date and the commit for a part.

    Raises:
        SystemExit: if there is no commit, or the checkout differs from it.
    """
    commit, changes = (
        _git("rev-parse", "HEAD"),
        _git("status", "--porcelain", "--untracked-files=no"),
    )
    if commit is None or changes not in ("", f"M {RECORD.relative_to(ROOT)}"):
        sys.exit(
            f"test: part {part} of --full is green; not recorded, because the checkout has changes:"
            " commit them first"
        )
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    content = runs() | {str(part): {"date": date, "commit": commit}}
    RECORD.write_text(json.dumps(dict(sorted(content.items())), indent=2) + "\n", "utf-8")
    print(f"test: part {part} of --full is green; commit {RECORD.relative_to(ROOT)}")


def stale() -> Iterator[str]:
    """Yield a sentence for each part that was green too many commits ago, or never.

    A clone without history says nothing: it cannot count commits.
    """
    if _git("rev-parse", "--is-shallow-repository") != "false":
        return
    known = runs()
    for part in range(1, PARTS + 1):
        run = known.get(str(part))
        command = f"run scripts/test --full {part}/{PARTS}"
        if run is None:
            yield f"part {part} of --full was never recorded as green; {command}"
            continue
        count = _git("rev-list", "--count", f"{run['commit']}..HEAD")
        if count is None:
            yield (
                f"part {part} of --full was green on {run['date']} at a commit missing here;"
                f" {command}"
            )
        elif int(count) > STALE:
            yield (
                f"part {part} of --full was green on {run['date']}, {count} commits ago; {command}"
            )


def _print_lines(lines: Iterable[str]) -> None:
    for line in lines:
        print(line)


def main(what: str, part: str = "0") -> None:
    """Print what the command line asks for."""
    if what == "files":
        _print_lines(files(int(part)))
    elif what == "environments":
        _print_lines(ENVIRONMENTS.get(int(part), ()))
    elif what == "green":
        record(int(part))
    else:
        for line in stale():
            print(f"test: warning: {line}")


if __name__ == "__main__":
    main(*sys.argv[1:])
