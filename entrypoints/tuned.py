"""A trial of a SageMaker tuning job: the toolkit of AWS's images runs this, and it becomes the launcher of stage train.

A tuning job's definition names no entrypoint, so the image's own one is the first process. It hands over the tuned
values as arguments too; the stage reads them from /opt/ml/input/config/hyperparameters.json.
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
