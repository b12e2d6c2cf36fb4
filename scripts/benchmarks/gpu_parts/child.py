"""The process of one part: import, wait for a line on stdin, measure, print results.

python -m scripts.benchmarks.gpu_parts.child NAME [--toy]
"""

from __future__ import annotations

import importlib
import os
import sys
import time
import traceback

from scripts.benchmarks.gpu_parts.bench import Bench
from scripts.benchmarks.gpu_parts.parts import PACKAGES, PARTS

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def main() -> int:
    """Run the part that the command line names; returns the exit code."""
    name, toy = sys.argv[1], "--toy" in sys.argv[2:]
    part = PARTS[name]
    bench, missing_reason = Bench(toy), None
    began = time.perf_counter()
    try:
        import torch

        if toy:  # compiling would take longer than everything else
            import torch._dynamo

            torch._dynamo.config.disable = True
        module, _, function = part.function.partition(":")
        measure = getattr(
            importlib.import_module(f"scripts.benchmarks.gpu_parts.{module}"), function
        )
        for module_name in part.modules:
            if toy and module_name.startswith("liger_kernel"):
                continue  # it needs CUDA, and the part says so
            importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        top = (error.name or "").partition(".")[0]
        missing_reason = f"not installed: pip install {PACKAGES.get(top, top)}"
    print(f"{name}: imported in {time.perf_counter() - began:.1f} s", flush=True)
    sys.stdin.readline()
    bench.emit(imported=True)
    if missing_reason is not None:
        bench.emit(missing=missing_reason)
        return 0
    if not toy:
        bench.gib = torch.cuda.get_device_properties(0).total_memory / 2**30
    bench.kind = "cpu" if toy else "cuda"
    try:
        measure(bench, *part.words)
    except Exception as error:
        traceback.print_exc(file=sys.stdout)
        bench.emit_failure(error)
    return 0


if __name__ == "__main__":
    try:
        code = main()
    except BaseException:
        traceback.print_exc(file=sys.stdout)
        code = 1
    sys.stdout.flush()
    os._exit(code)  # not through destructors that wait for other processes
