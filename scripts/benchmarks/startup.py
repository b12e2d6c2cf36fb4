"""Start-up time: `import smtrain` and `smtrain --help` compared with importing the SageMaker SDK.

`import sagemaker.train` alone loads nothing (it is lazy since SDK v3), so both sides load what a
user calls: `sagemaker.train.ModelTrainer` and `smtrain.launch` with `smtrain.JobConfig`. The bare
imports are reported too, as seconds over an empty interpreter. Runs are paired A B A B, medians
reported.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

PYTHON = sys.executable
CASES = {
    "python": [PYTHON, "-c", "pass"],
    "sagemaker_usable": [PYTHON, "-c", "from sagemaker.train import ModelTrainer"],
    "smtrain_usable": [PYTHON, "-c", "import smtrain; smtrain.launch; smtrain.JobConfig"],
    "smtrain_help": [str(Path(PYTHON).parent / "smtrain"), "--help"],
    "sagemaker_bare": [PYTHON, "-c", "import sagemaker.train"],
    "smtrain_bare": [PYTHON, "-c", "import smtrain"],
}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="one line of JSON")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    times: dict[str, list[float]] = {name: [] for name in CASES}
    for round_ in range(options.rounds + 1):
        for name, command in CASES.items():
            began = time.perf_counter()
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            if round_:  # the first round fills the page cache
                times[name].append(time.perf_counter() - began)
    median = {name: statistics.median(values) for name, values in times.items()}
    empty = median["python"]
    result = {
        "import_ratio": round(median["smtrain_usable"] / median["sagemaker_usable"], 4),
        "help_ratio": round(median["smtrain_help"] / median["sagemaker_usable"], 4),
        "bare_import_ratio": round(
            (median["smtrain_bare"] - empty) / (median["sagemaker_bare"] - empty), 4
        ),
        **{f"{name}_s": round(value, 4) for name, value in median.items()},
    }
    if options.json:
        print(json.dumps(result))
    else:
        for name, value in result.items():
            print(f"{name:20} {value}")


if __name__ == "__main__":
    main()
