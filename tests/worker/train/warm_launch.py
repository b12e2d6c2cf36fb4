"""entrypoints/launch.py with its torchrun in a copy of a warm Python, as in a sandbox:
`warm_launch.py NAME STAGE`.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "entrypoints"))
    import launch  # type: ignore[import-not-found]
    import warm  # type: ignore[import-not-found]

    name = sys.argv.pop(1)

    def copy(arguments: list[str], must: bool) -> Any:
        return warm.begin(name, arguments[1:], dict(os.environ), [0, 1, 2])

    launch.copy = copy
    launch.main()
