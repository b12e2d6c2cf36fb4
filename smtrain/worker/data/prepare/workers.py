"""Worker processes that end with the process that started them."""

from __future__ import annotations

import multiprocessing
import os
import threading


def end_with_parent() -> None:
    """To be called in a worker process: a killed parent cannot tell its workers to end, and they would wait on."""
    threading.Thread(target=_wait, daemon=True).start()


def _wait() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
