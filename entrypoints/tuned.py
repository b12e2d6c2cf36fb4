"""A trial of a SageMaker tuning job: the toolkit in AWS's images runs this script, which becomes
the launcher.

A tuning job's definition has no entrypoint, so the image's own one is the first process. The tuned
values in its arguments are ignored; the stage reads them from
/opt/ml/input/config/hyperparameters.json.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path


def main() -> None:
    """Become the launcher."""
    launcher = Path(__file__).resolve().with_name("launch.py")
    os.execv(sys.executable, [sys.executable, str(launcher), "train"])  # noqa: S606


if __name__ == "__main__":
    main()
