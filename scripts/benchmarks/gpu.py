"""Training steps on one GPU, next to other projects in the same run: torchtitan, transformers,
Liger, peft.

Every part runs in its own process with its own time limit, the most important ones first. Each
result is appended to results.jsonl in --out as it comes, so a killed run keeps earlier results.
Without CUDA, or with --toy, everything runs at toy size on the CPU, without compiling: that shows
that it works, and says nothing about speed.

It runs from a checkout without `scripts/setup` and without a network, if torch, transformers and
the packages of --wheels can be imported: `python scripts/benchmarks/gpu.py`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[0] = str(ROOT)  # not this folder, whose names are common

from scripts.benchmarks.gpu_parts.driver import Driver, Line, child_command  # noqa: E402
from scripts.benchmarks.gpu_parts.figures import add_figures, summary, table_of  # noqa: E402
from scripts.benchmarks.gpu_parts.parts import CARRIED_PACKAGES, NEEDED_PACKAGES, PARTS  # noqa: E402

WHEELS = """\
# For a machine with a GPU and no network that has Python 3.12, torch with triton, transformers and numpy.
# With a network, for example on your laptop:
python -m pip download --no-deps --only-binary=:all: --python-version 3.12 --platform manylinux_2_28_x86_64 \\
  --platform manylinux2014_x86_64 --dest wheels \\
  {packages}
# If it has torch only, these too: {others}
# On the machine with the GPU, in the checkout:
python3 -m pip install --no-index --no-deps --target wheels/site wheels/*.whl
PYTHONPATH=wheels/site python3 scripts/benchmarks/gpu.py --out gpu-results"""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="one line of JSON")
    parser.add_argument(
        "--out", type=Path, help="folder for results.jsonl and log.txt; default: a new one in /tmp"
    )
    parser.add_argument("--only", help="only these parts, separated by commas", metavar="NAME,...")
    parser.add_argument("--minutes", type=float, default=8.0, help="for everything (default: 8)")
    parser.add_argument(
        "--toy", action="store_true", help="toy size on the CPU; the default without CUDA"
    )
    parser.add_argument(
        "--list", action="store_true", help="the parts in order, with their time limits in seconds"
    )
    parser.add_argument(
        "--wheels", action="store_true", help="packages to carry to a machine without a network"
    )
    options = parser.parse_args()
    if options.list:
        print(
            "\n".join(
                f"{name:22} {part.seconds:4.0f}  {part.description}" for name, part in PARTS.items()
            )
        )
        return
    if options.wheels:
        print(
            WHEELS.format(
                packages=" \\\n  ".join(CARRIED_PACKAGES), others=" ".join(NEEDED_PACKAGES)
            )
        )
        return
    names = options.only.split(",") if options.only else [*PARTS]
    if unknown_parts := [name for name in names if name not in PARTS]:
        parser.error(f"--only: no part {', '.join(unknown_parts)}; --list names them")
    toy = options.toy or not has_cuda()
    folder = options.out or Path(tempfile.mkdtemp(prefix="smtrain-bench-gpu-"))
    folder.mkdir(parents=True, exist_ok=True)
    lines = run(names, toy, options.minutes * 60, folder)
    print(json.dumps(summary(lines)) if options.json else table_of(lines))


def has_cuda() -> bool:
    """Whether torch finds a GPU.

    It is asked in another process, since this one would keep memory of the GPU.
    """
    if any(Path("/dev").glob("nvidia[0-9]*")):
        return True
    command = [sys.executable, "-c", "import sys, torch; sys.exit(not torch.cuda.is_available())"]
    return subprocess.run(command, check=False, capture_output=True).returncode == 0


def run(names: list[str], toy: bool, seconds: float, folder: Path) -> list[Line]:
    """Run the parts; returns their lines, which are also in results.jsonl."""
    lines, began = list[Line](), time.monotonic()
    with (folder / "results.jsonl").open("a", encoding="utf-8") as file:

        def keep(line: Line) -> None:
            device = next((candidate for candidate in lines if "device" in candidate), None)
            try:
                line = add_figures(line, device, toy)
            except Exception as error:  # a result without its plan is better than no result
                line = {**line, "plan": f"{type(error).__name__}: {error}"}
            lines.append(line)
            file.write(json.dumps(line) + "\n")
            file.flush()
            print(
                f"{time.monotonic() - began:6.1f} s  {json.dumps(line)[:200]}",
                file=sys.stderr,
                flush=True,
            )

        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        # A toy part may run on a busy machine, whose time says nothing.
        limits = {name: PARTS[name].seconds * (10 if toy else 1) for name in names}
        driver = Driver(
            limits,
            lambda name: child_command(name, toy),
            seconds,
            folder,
            keep,
            env={"PYTHONPATH": path, **({"OMP_NUM_THREADS": "1"} if toy else {})},
        )
        driver.run()
    return lines


if __name__ == "__main__":
    main()
