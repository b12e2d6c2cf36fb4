"""The process of one part: import, wait for a line on stdin, measure, print results.

python -m scripts.benchmarks.gpu_parts.child NAME [--toy]
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
import traceback
from dataclasses import dataclass, field
from typing import Any

from scripts.benchmarks.gpu_parts.driver import RESULT
from scripts.benchmarks.gpu_parts.parts import PACKAGES, PARTS
from scripts.benchmarks.gpu_parts.shapes import bytes_of, described, lengthened

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


@dataclass
class Bench:
    """What a part's function gets."""

    toy: bool
    kind: str = "cuda"
    """The device's type."""
    gib: float = 0.0
    """The device's memory."""
    layers: dict[str, int] = field(default_factory=dict)
    """Layers of the models that were made smaller for this device."""
    compiled: tuple[int, int] = (0, 0)
    """Rows and length of a micro-batch that `row` measured last."""

    def length(self, tokens: int) -> int:
        """The length of a row, of a 64th at toy size."""
        return lengthened(tokens, self.toy)

    def model(self, name: str, width: float = 18.0) -> dict[str, Any]:
        """A model's config.json, with as many layers as fit: `width` is the bytes for each parameter."""
        config = described(name, self.toy)
        while not self.toy and config["num_hidden_layers"] > 1 and bytes_of(config, width) > 0.85 * self.gib * 2**30:
            config["num_hidden_layers"] //= 2
            self.layers[name] = config["num_hidden_layers"]
        return config

    def emit(self, **line: Any) -> None:
        """Print a result; the driver keeps it at once."""
        print(RESULT + json.dumps(line), flush=True)

    def failed(self, error: Exception, **line: Any) -> None:
        """Print the reason why there is no result."""
        self.emit(**line, failed=f"{type(error).__name__}: {' '.join(str(error).split())[:200]}")


def main() -> int:
    """Run the part that the command line names; returns the exit code."""
    name, toy = sys.argv[1], "--toy" in sys.argv[2:]
    part = PARTS[name]
    bench, missing = Bench(toy), None
    began = time.perf_counter()
    try:
        import torch

        if toy:  # compiling would take longer than everything else
            import torch._dynamo

            torch._dynamo.config.disable = True
        module, _, function = part.function.partition(":")
        measure = getattr(importlib.import_module(f"scripts.benchmarks.gpu_parts.{module}"), function)
        for needed in part.modules:
            if toy and needed.startswith("liger_kernel"):
                continue  # it needs CUDA, and the part says so
            importlib.import_module(needed)
    except ModuleNotFoundError as error:
        top = (error.name or "").partition(".")[0]
        missing = f"not installed: pip install {PACKAGES.get(top, top)}"
    sys.stdin.readline()
    bench.emit(imported=True)
    if missing is not None:
        bench.emit(missing=missing)
        return 0
    if not toy:
        bench.gib = torch.cuda.get_device_properties(0).total_memory / 2**30
    bench.kind = "cpu" if toy else "cuda"
    print(f"{name}: imported in {time.perf_counter() - began:.1f} s", flush=True)
    measure(bench, *part.words)
    return 0


if __name__ == "__main__":
    try:
        code = main()
    except BaseException:
        traceback.print_exc(file=sys.stdout)
        code = 1
    sys.stdout.flush()
    os._exit(code)  # not through destructors that wait for other processes
