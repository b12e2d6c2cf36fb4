"""What the harness and its libraries are told while they work, and what they find as it was afterwards.

They take their settings from the environment while they are imported, once for the whole process: in a notebook, what
was good for one evaluation would hold for all that its user does next.
"""

from __future__ import annotations

import contextlib
import http.client
import inspect
import os
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from functools import partialmethod
from pathlib import Path
from typing import Any


def hub_answers(seconds: float = 3.0) -> bool:
    """Whether the hub answers within some seconds. The libraries ask five times, for 40 seconds in all."""
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        return False
    answered = threading.Event()

    def ask() -> None:
        request = urllib.request.Request(endpoint(), method="HEAD")  # noqa: S310 - the hub's own address
        try:
            urllib.request.urlopen(request, timeout=seconds).close()  # noqa: S310
        except urllib.error.HTTPError:
            pass  # an answer too
        except (OSError, ValueError, http.client.HTTPException):
            return
        answered.set()

    # Looking up a name has no time limit of its own, so it is left behind.
    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(seconds)
    return answered.is_set()


def endpoint() -> str:
    """The hub's address, as its library reads it."""
    return os.environ.get("HF_ENDPOINT") or "https://huggingface.co"


def holds_data_sets() -> bool:
    """Whether the folders in which the hub's libraries keep data sets have any."""
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache/huggingface").expanduser()
    hub = Path(os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE") or home / "hub")
    made = Path(os.environ.get("HF_DATASETS_CACHE") or home / "datasets")
    return any(hub.glob("datasets--*")) or any(path.is_dir() for path in made.glob("*"))


@contextlib.contextmanager
def settled(cache: Path, offline: bool) -> Iterator[None]:
    """Data goes into `cache` unless the user names another folder; `offline`, nothing is asked of the hub.

    Where there is no terminal, no bars are drawn.
    """
    from datasets import config
    from huggingface_hub import constants
    from lm_eval.api import task
    from transformers.utils import hub

    told: list[tuple[Any, str, Any]] = []
    if "HF_DATASETS_CACHE" not in os.environ:
        told.append((config, "HF_DATASETS_CACHE", cache))
        told.append((config, "DOWNLOADED_DATASETS_PATH", cache / "downloads"))
        told.append((config, "EXTRACTED_DATASETS_PATH", cache / "downloads/extracted"))
    if offline:
        told += [(config, "HF_HUB_OFFLINE", True), (config, "HF_DATASETS_OFFLINE", True)]
        told.append((constants, "HF_HUB_OFFLINE", True))
        if hasattr(hub, "_is_offline_mode"):  # transformers 4
            told.append((hub, "_is_offline_mode", True))
    if not sys.stderr.isatty():
        told.append((task.tqdm, "__init__", partialmethod(task.tqdm.__init__, disable=True)))
    with _told(told):
        yield


@contextlib.contextmanager
def within(folder: Path | None) -> Iterator[None]:
    """In the folder of the tasks: the files that a task names are relative to it."""
    before = Path.cwd()
    if folder is not None:
        os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without the harness's and its libraries' warnings about themselves."""
    import logging
    import warnings

    loggers = [logging.getLogger(name) for name in ("lm_eval", "datasets", "transformers", "lm-eval")]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)


@contextlib.contextmanager
def no_repository() -> Iterator[None]:
    """The harness asks git for the commit of whatever folder this is, which complains where it is no repository."""
    from lm_eval import evaluator

    with _told([(evaluator, "get_git_commit_hash", lambda: None)]):
        yield


@contextlib.contextmanager
def _told(values: list[tuple[Any, str, Any]]) -> Iterator[None]:
    """With these attributes of libraries, (where, name, value) each, and with their own afterwards."""
    # As they lie there: read as an attribute, a method that is made when it is read is another one each time.
    before = [(where, name, inspect.getattr_static(where, name, None)) for where, name, _ in values]
    try:
        for where, name, value in values:
            setattr(where, name, value)
        yield
    finally:
        for where, name, value in before:
            setattr(where, name, value)
