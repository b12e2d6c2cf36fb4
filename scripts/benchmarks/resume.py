"""The cost of verifying a checkpoint when resuming: `checkpoint.verify: full` compared with `size`,
in one run.

One rank writes a native checkpoint of a Llama with about `--billions` parameters (bf16, 14 bytes
per parameter on disk). Fresh processes then build the engine and load it as stage train does,
alternately with and without hashes, each time with the files out of the page cache. `share` is
(full - size) / size of the median seconds from the first hash to the loaded state, `cpu_share` the
same of CPU seconds, which a busy machine changes less, `waited_share` the share of waiting for
hashes when all else was done, `gb_per_s` the rate of checking while loading. Needs about 20 GB of
memory and 14 GB of disk per billion, and uses fewer parameters if they are not available. Progress
is printed on stderr. 0.3 billion take a few minutes on two cores; the guarantee is for `--billions
2.4`.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

BYTES_ON_DISK, BYTES_IN_MEMORY = (
    14,
    20,
)  # bf16: weights and state; then with gradients and the save's copies


def config_of(billions: float) -> dict[str, Any]:
    """A Llama of at most 24 layers, as wide as necessary."""
    vocabulary = 32000
    for layers in (4, 8, 16, 24, 32):
        for hidden_size in range(256, 4097, 64):
            if (
                layers * 12 * hidden_size**2 + 2 * vocabulary * hidden_size >= billions * 1e9
                and hidden_size <= 128 * layers
            ):
                return {
                    "model_type": "llama",
                    "hidden_size": hidden_size,
                    "num_hidden_layers": layers,
                    "num_attention_heads": hidden_size // 64,
                    "num_key_value_heads": hidden_size // 64,
                    "intermediate_size": hidden_size * 8 // 3 // 64 * 64,
                    "vocab_size": vocabulary,
                    "max_position_embeddings": 128,
                    "tie_word_embeddings": False,
                    "rms_norm_eps": 1e-5,
                }
    raise SystemExit(f"no shape for {billions} billion parameters")


def engine_of(config: dict[str, Any]) -> Any:
    from smtrain.core.model.shape import ModelShape
    from smtrain.worker.engine.base import OptimizerOptions, ParallelOptions
    from smtrain.worker.engine.initial_weights import Zeros
    from smtrain.worker.engine.native import NativeEngine, init_distributed

    init_distributed()
    zeros = Zeros(config, ModelShape.from_config(config), 0)
    return NativeEngine(config, ParallelOptions(precision="bf16"), OptimizerOptions(), zeros, 0)


def write(folder: Path, config: dict[str, Any]) -> None:
    """Write a checkpoint of step 1."""
    engine = engine_of(config)
    engine.save(folder, 1, {"samples": 1})
    engine.close()


def load(folder: Path, model_config: dict[str, Any], verify: str) -> dict[str, float]:
    """Resume as stage train does: start hashing, build the engine, load the state, wait for the
    hashes.
    """
    import torch.distributed as dist

    from smtrain.core.config import JobConfig
    from smtrain.core.protocol.lineage import Lineage
    from smtrain.worker.engine.native import init_distributed
    from smtrain.worker.train.engines import join
    from smtrain.worker.train.resume import Resume, choose

    config = JobConfig.model_validate(
        {
            "model": {"path": "x"},
            "compute": {"processes_per_instance": 1},
            "checkpoint": {"verify": verify},
        }
    )
    init_distributed()
    gather, records = join(config)
    began, busy = time.perf_counter(), time.process_time()
    resume = Resume(choose(Lineage.of(folder, ""), records, gather, None), records, gather, config)
    built_from = time.perf_counter()
    engine = engine_of(model_config)
    build_seconds = time.perf_counter() - built_from
    resume.load(engine)
    seconds = time.perf_counter() - began
    resume.close()
    figures = {
        "seconds": seconds,
        "build": build_seconds,
        "waited": resume.waited,
        "bytes": resume.hashed,
        "loading": resume.loading,
        "parameters": engine.parameters,
        "cpu": time.process_time() - busy,
    }
    dist.destroy_process_group()
    return figures


def forget(folder: Path) -> None:
    """Evict the files from the page cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            handle = os.open(path, os.O_RDONLY)
            os.fsync(handle)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(handle)


def fitting(billions: float, folder: Path) -> float:
    """The billions of parameters that memory and disk have space for."""
    memory = Path("/proc/meminfo").read_text().splitlines()
    available = (
        next(int(line.split()[1]) for line in memory if line.startswith("MemAvailable")) * 1024
    )
    free = shutil.disk_usage(folder).free
    return min(billions, 0.7 * available / BYTES_IN_MEMORY / 1e9, 0.7 * free / BYTES_ON_DISK / 1e9)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="one line of JSON")
    parser.add_argument("--billions", type=float, default=0.3)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--part", nargs=3, help=argparse.SUPPRESS)  # run inside a child process
    options = parser.parse_args()
    if options.part:
        script_folder = str(Path(__file__).resolve().parent)
        sys.path[:] = [
            path for path in sys.path if path != script_folder
        ]  # secrets.py here would hide Python's own
        name_of_part, folder, config = (
            options.part[0],
            Path(options.part[1]),
            json.loads(options.part[2]),
        )
        if name_of_part == "write":
            write(folder, config)
        print(json.dumps({} if name_of_part == "write" else load(folder, config, name_of_part)))
        return
    billions = fitting(options.billions, options.folder)
    config = config_of(billions)
    began = time.monotonic()

    def say(text: str) -> None:
        print(f"{time.monotonic() - began:6.0f} s  {text}", file=sys.stderr, flush=True)

    if billions < options.billions:
        say(f"memory and disk hold {billions:.2f} billion parameters, not {options.billions:g}")
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="bench-resume-") as name:

        def part(name_of_part: str) -> dict[str, float]:
            command = [sys.executable, __file__, "--part", name_of_part, name, json.dumps(config)]
            result = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            figures: dict[str, float] = json.loads(result.stdout.splitlines()[-1])
            return figures

        say(
            f"writing a checkpoint of {billions:.2f} billion parameters, some"
            f" {billions * BYTES_ON_DISK:.1f} GB"
        )
        part("write")
        runs: dict[str, list[dict[str, float]]] = {"full": [], "size": []}
        for round_ in range(options.rounds):
            for verify in sorted(runs, reverse=bool(round_ % 2)):
                forget(Path(name))
                runs[verify].append(part(verify))
                say(
                    f"round {round_ + 1} of {options.rounds}: verify {verify},"
                    f" {runs[verify][-1]['seconds']:.1f} s"
                )
    full, size = (
        statistics.median(run["seconds"] for run in runs[verify]) for verify in ("full", "size")
    )
    full_cpu, size_cpu = (
        statistics.median(run["cpu"] for run in runs[verify]) for verify in ("full", "size")
    )
    result = {
        "billions": round(runs["full"][0]["parameters"] / 1e9, 3),
        "share": round((full - size) / size, 4),
        "cpu_share": round((full_cpu - size_cpu) / size_cpu, 4),
        "waited_share": round(
            statistics.median(r["waited"] / r["seconds"] for r in runs["full"]), 4
        ),
        "gb_per_s": round(
            statistics.median(r["bytes"] / 1e9 / r["loading"] for r in runs["full"]), 3
        ),
        "gigabytes": round(runs["full"][0]["bytes"] / 1e9, 3),
        "full_s": round(full, 3),
        "size_s": round(size, 3),
        "build_s": round(statistics.median(run["build"] for run in runs["size"]), 3),
    }
    if options.json:
        print(json.dumps(result))
    else:
        for key, value in result.items():
            print(f"{key:14} {value}")


if __name__ == "__main__":
    main()
