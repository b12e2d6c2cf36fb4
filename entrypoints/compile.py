"""Stage compile: the graphs of the training run -> the compile cache, by neuron_parallel_compile on
one host.

The tool runs the training script with every process of the mesh and a runtime that answers zeros,
then compiles the graphs that it saw. It writes to this host's disk, so that failed graphs, which it
would remember, never reach the cache.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from compile_cache import GraphsInFolder, GraphsInS3

from smtrain.core.config import JobConfig
from smtrain.core.errors import SmtrainError
from smtrain.core.facts import table
from smtrain.core.protocol.container import Container
from smtrain.worker.engine.nxd.compilation import PROGRAM, Cache, Listener, Totals, reason
from smtrain.worker.entry import main

FOLDER = Path(__file__).resolve().parent


def stage(config: JobConfig, container: Container) -> None:
    program = shutil.which(PROGRAM)
    if program is None:
        images = table("images")
        raise SmtrainError(
            f"{PROGRAM} is not in this container; the image"
            f" {images['repository']}:{images['default_tag']} has it (compute.image), or leave"
            " stage compile out"
        )
    uri = os.environ["NEURON_COMPILE_CACHE_URL"]
    graph_cache = GraphsInS3(uri) if uri.startswith("s3://") else GraphsInFolder(uri)
    folder = container.root / "graphs"
    folder.mkdir(exist_ok=True)
    graph_cache.fetch(folder)
    cached_count, began = len(Cache.read(folder).complete_entries), time.monotonic()
    print(f"{cached_count} graphs are in the cache {graph_cache.uri}", flush=True)
    status, totals = _run([program, *_trial(config)], folder)
    cache = Cache.read(folder)
    if totals is None:
        raise SmtrainError(
            f"{PROGRAM} ended with status {status} before it compiled anything; what the training"
            " run said above is the cause"
        )
    graph_cache.store(
        folder, cache.files()
    )  # even if some failed: the next attempt compiles only those
    seconds = time.monotonic() - began
    result = {
        "total": totals.total,
        "successful": totals.successful,
        "failed": totals.failed,
        "cached": cached_count,
        "graphs": len(cache.complete_entries),
        "failures": {path.name: reason(path) for path in cache.failed_entries},
        "compilers": sorted({path.parent.name for path in cache.complete_entries}),
        "seconds": round(seconds, 1),
        "cache": graph_cache.uri,
        "job": os.environ.get("TRAINING_JOB_NAME", ""),
    }
    print(
        f"graphs={totals.total} compiled={totals.successful} failed={totals.failed}"
        f" cached={cached_count} seconds={seconds:.0f}",
        flush=True,
    )
    if totals.failed or cache.failed_entries or status:
        raise SmtrainError(_failure(totals, cache, status))
    if not cache.complete_entries:
        raise SmtrainError(
            f"{PROGRAM} saw no graph at all; is this an image for {config.compute.instance_type}?"
        )
    container.model_dir.mkdir(parents=True, exist_ok=True)
    (container.model_dir / "compilation.json").write_text(
        json.dumps(result, indent=1) + "\n", "utf-8"
    )
    graph_cache.complete(result)


def _trial(config: JobConfig) -> list[str]:
    """The command of the training run, with all its processes on this host."""
    return [
        sys.executable,
        str(FOLDER / "rendezvous.py"),
        "--nnodes=1",
        f"--nproc_per_node={config.world_size}",
        "--master_addr=127.0.0.1",
        f"--master_port={os.environ.get('SMTRAIN_MASTER_PORT', '7777')}",
        str(FOLDER / "train.py"),
    ]


def _run(command: list[str], folder: Path) -> tuple[int, Totals | None]:
    """Run the program; returns its exit status and totals. Its lines go to the log at once."""
    listener = Listener()
    environment = {**os.environ, "NEURON_COMPILE_CACHE_URL": str(folder)}
    environment.setdefault("OMP_NUM_THREADS", "1")
    environment["GLOO_SOCKET_IFNAME"] = "lo"  # all ranks are on this host
    with subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as process:
        assert process.stdout
        for line in process.stdout:
            sys.stdout.write(line)
            sys.stdout.flush()
            listener.hear(line)
    return process.returncode, listener.totals


def _failure(totals: Totals, cache: Cache, status: int) -> str:
    names = [f"{path.name}: {reason(path)}" for path in cache.failed_entries]
    failures = "; ".join(names[:3]) + (f"; and {len(names) - 3} more" if len(names) > 3 else "")
    return (
        f"{max(totals.failed, len(names))} of {totals.total} graphs did not compile (status"
        f" {status}), and were not cached; read the compiler's errors above, try smaller pieces"
        " (parallel.pp, parallel.tp, train.seq_len) or another image, and launch stage compile"
        f" again: {failures or 'they left nothing in the cache'}"
    )


if __name__ == "__main__":
    main(stage)
