"""Settings and progress of the harness and its libraries, restored after each evaluation.

The libraries read their settings from the environment when they are imported, once for the process:
in a notebook, the settings of one evaluation would otherwise hold for everything that follows.
"""

from __future__ import annotations

import contextlib
import http.client
import inspect
import os
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from functools import partialmethod
from pathlib import Path
from typing import Any

from smtrain.worker.evaluation.generated_code import confined_metric

PROGRESS_SECONDS = 30.0
"""Seconds between two lines."""


def hub_answers(seconds: float = 3.0) -> bool:
    """Whether the hub answers within some seconds.

    The libraries themselves retry for 40 seconds.
    """
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        return False
    has_answer = threading.Event()

    def ask() -> None:
        request = urllib.request.Request(endpoint(), method="HEAD")  # noqa: S310 - the hub's own address
        try:
            urllib.request.urlopen(request, timeout=seconds).close()  # noqa: S310
        except urllib.error.HTTPError as error:
            error.close()  # an error status is an answer too
        except (OSError, ValueError, http.client.HTTPException):
            return
        has_answer.set()

    # Looking up a name has no time limit, so leave the thread behind.
    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(seconds)
    return has_answer.is_set()


def endpoint() -> str:
    """The hub's address, read as its library does."""
    return os.environ.get("HF_ENDPOINT") or "https://huggingface.co"


def holds_data_sets() -> bool:
    """Whether the hub's libraries have cached any data sets."""
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache/huggingface").expanduser()
    hub = Path(
        os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE") or home / "hub"
    )
    datasets_cache = Path(os.environ.get("HF_DATASETS_CACHE") or home / "datasets")
    return any(hub.glob("datasets--*")) or any(path.is_dir() for path in datasets_cache.glob("*"))


@contextlib.contextmanager
def configure_libraries(cache: Path, offline: bool, run_code: bool = False) -> Iterator[None]:
    """Cache data in `cache` unless the user names another folder; with `offline`, do not ask the
    hub.

    With `run_code` the metric that runs generated code is ours. Progress bars are drawn only on a
    terminal.
    """
    from datasets import config
    from huggingface_hub import constants
    from lm_eval.api import task
    from transformers.utils import hub

    patches: list[tuple[Any, str, Any]] = []
    if "HF_DATASETS_CACHE" not in os.environ:
        patches.append((config, "HF_DATASETS_CACHE", cache))
        patches.append((config, "DOWNLOADED_DATASETS_PATH", cache / "downloads"))
        patches.append((config, "EXTRACTED_DATASETS_PATH", cache / "downloads/extracted"))
    if offline:
        patches += [(config, "HF_HUB_OFFLINE", True), (config, "HF_DATASETS_OFFLINE", True)]
        patches.append((constants, "HF_HUB_OFFLINE", True))
        if hasattr(hub, "_is_offline_mode"):  # transformers 4
            patches.append((hub, "_is_offline_mode", True))
    if not sys.stderr.isatty():
        patches.append((task.tqdm, "__init__", partialmethod(task.tqdm.__init__, disable=True)))
    with _patch_attributes(patches), confined_metric() if run_code else contextlib.nullcontext():
        yield


@contextlib.contextmanager
def in_folder(folder: Path | None) -> Iterator[None]:
    """Work in the folder of the tasks, because the files that a task names are relative to it."""
    previous_folder = Path.cwd()
    if folder is not None:
        os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(previous_folder)


@contextlib.contextmanager
def silence_warnings() -> Iterator[None]:
    """Suppress the warnings of the harness and its libraries about themselves."""
    import logging
    import warnings

    loggers = [
        logging.getLogger(name) for name in ("lm_eval", "datasets", "transformers", "lm-eval")
    ]
    previous_levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, previous_levels, strict=True):
            logger.setLevel(level)


@contextlib.contextmanager
def no_repository() -> Iterator[None]:
    """Keep the harness from asking git for the commit of this folder; git complains if it is not a
    repository.
    """
    from lm_eval import evaluator

    with _patch_attributes([(evaluator, "get_git_commit_hash", lambda: None)]):
        yield


@contextlib.contextmanager
def _patch_attributes(values: list[tuple[Any, str, Any]]) -> Iterator[None]:
    """Set attributes of libraries, each (owner, name, value), and restore them afterwards."""
    # getattr would bind methods and descriptors, and restoring that would change the library.
    original_values = [
        (owner, name, inspect.getattr_static(owner, name, None)) for owner, name, _ in values
    ]
    try:
        for owner, name, value in values:
            setattr(owner, name, value)
        yield
    finally:
        for owner, name, value in original_values:
            setattr(owner, name, value)


class HarnessProgress:
    """Prints how far an evaluation has come: it takes hours for a large model or on a CPU.

    The harness calls its cache hook after each request; this takes the hook's place.
    """

    def __init__(
        self, say: Callable[[str], None], interval_seconds: float = PROGRESS_SECONDS
    ) -> None:
        self._say, self._every = say, interval_seconds
        self._whole = self._done = 0
        self._last = time.monotonic()

    def watch(self, model: Any) -> None:
        """Count the requests to a model of the harness from now on; its own bars are drawn only on
        a terminal.
        """
        for kind in ("loglikelihood", "loglikelihood_rolling", "generate_until"):
            setattr(model, kind, self._count_requests(getattr(model, kind)))
        model.set_cache_hook(self)

    def _count_requests(self, answers: Callable[..., Any]) -> Callable[..., Any]:
        def answer_requests(requests: list[Any], disable_tqdm: bool = False) -> Any:
            self._whole, self._done = len(requests), 0
            return answers(requests, disable_tqdm=disable_tqdm or not sys.stderr.isatty())

        return answer_requests

    def add_partial(self, _kind: str, _request: Any, _answer: Any) -> None:
        """Count one answered request; the harness calls this."""
        self._done += 1
        timestamp = time.monotonic()
        if timestamp - self._last >= self._every and self._done < self._whole:
            self._last = timestamp
            self._say(f"{self._done:,} of {self._whole:,} requests")
