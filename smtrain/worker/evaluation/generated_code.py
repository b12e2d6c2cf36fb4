"""Score code that a model wrote by running it with its tests, each program in a confined process of
its own.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from math import comb
from typing import Any

from smtrain.core.errors import SmtrainError
from smtrain.core.machine import cores_here
from smtrain.worker.evaluation import sandbox

WALL_SECONDS = 30.0
"""For a program that sleeps or waits; one that computes ends after `confined.CPU_SECONDS`."""
METRIC = "code_eval"
_UTILS = tuple(
    f"lm_eval.tasks.{name}.utils" for name in ("humaneval", "humaneval_infilling", "mbpp")
)


def passes(program: str) -> bool:
    """Whether a program runs to its end without an exception.

    Raises `SmtrainError` if it cannot be confined here.
    """
    word = secrets.token_hex(16)
    reader, writer = os.pipe()
    try:
        with tempfile.TemporaryDirectory(prefix="smtrain-generated-") as folder:
            command = [sys.executable, "-I", sandbox.__file__, folder, str(writer)]
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd=folder,
                env={
                    "PATH": os.defpath,
                    "LANG": "C.UTF-8",
                    "OMP_NUM_THREADS": "1",
                    "OPENBLAS_NUM_THREADS": "1",
                },
                pass_fds=(writer,),
                start_new_session=True,
            )
            os.close(writer)
            writer = -1
            try:
                process.communicate(
                    f"{word}\n{program}".encode(errors="replace"), timeout=WALL_SECONDS
                )
            except subprocess.TimeoutExpired:
                pass
            finally:
                process.kill()
                process.wait()
            os.set_blocking(reader, False)
            with contextlib.suppress(BlockingIOError):
                answer = os.read(reader, 1 << 12).decode(errors="replace")
                if answer.startswith("refused "):
                    raise SmtrainError(
                        "generated code cannot be confined on this machine"
                        f" ({answer.removeprefix('refused ')}); evaluate on Linux with x86-64 or"
                        " arm64, or leave out the tasks that run code."
                    )
                return answer == word
            return False
    finally:
        os.close(reader)
        if writer >= 0:
            os.close(writer)


class ConfinedCodeEval:
    """The metric `code_eval` of the package `evaluate`, whose programs run confined.

    Same arguments and results; the harness's tasks load it by its name.
    """

    def compute(
        self,
        references: list[str],
        predictions: list[list[str]],
        k: list[int] | None = None,
        **_: Any,
    ) -> tuple[dict[str, float], dict[int, list[bool]]]:
        """pass@k over the candidates of each problem, and whether each candidate passed."""
        programs = [
            f"{candidate}\n{test}"
            for candidates, test in zip(predictions, references, strict=True)
            for candidate in candidates
        ]
        with ThreadPoolExecutor(max_workers=cores_here()) as pool:
            verdicts = iter(list(pool.map(passes, programs)))
        results = {
            at: [next(verdicts) for _ in candidates] for at, candidates in enumerate(predictions)
        }
        counts = [
            (len(problem_results), sum(problem_results)) for problem_results in results.values()
        ]
        scores = {
            f"pass@{size}": (
                sum(pass_at(size, total, right) for total, right in counts) / len(counts)
            )
            for size in k or [1, 10, 100]
            if all(total >= size for total, _ in counts)
        }
        return scores, results


def pass_at(size: int, total: int, right: int) -> float:
    """The chance that one of `size` of the candidates is right (unbiased; arXiv:2107.03374,
    equation 1).
    """
    return 1.0 - comb(total - right, size) / comb(total, size)


@contextlib.contextmanager
def confined_metric() -> Iterator[None]:
    """Give the harness's tasks `ConfinedCodeEval` when they load the metric, which else comes from
    the hub.
    """
    evaluate: Any = import_module("evaluate")
    original_load = evaluate.load

    def load(path: str, *arguments: Any, **options: Any) -> Any:
        return ConfinedCodeEval() if path == METRIC else original_load(path, *arguments, **options)

    def forget() -> None:
        for name in _UTILS:  # they hold the metric that was loaded when they were imported
            sys.modules.pop(name, None)

    forget()
    evaluate.load = load
    try:
        yield
    finally:
        evaluate.load = original_load
        forget()
