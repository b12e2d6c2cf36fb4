"""Read the first records of data sets of the Hugging Face hub for `check`, if they come soon."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import replace

from smtrain.client.findings import Finding
from smtrain.core.extras import missing_module, present

HUB_S = 30.0
"""Seconds to wait for the records of one data set; a parquet file's first rows took 3 s."""


def hub_findings(
    uri: str, check: str, key: str, read: Callable[[], Iterable[Finding]]
) -> list[Finding]:
    """The findings of `read` about a data set of the hub, or a warning that it was not read.

    Args:
        uri: The data set, hf://NAME...
        check: The name of the check.
        key: The key of the config that names it.
        read: Reads its first records, and may wait for the network.

    Raises `SmtrainError` for records that stage prepare would refuse.
    """
    reason, remedy = _unread_reason(uri, read)
    if isinstance(reason, list):
        return reason
    return [Finding(check, "warning", f"{key}: {uri} was not read here: {reason}", remedy)]


def _unread_reason(
    uri: str, read: Callable[[], Iterable[Finding]]
) -> tuple[list[Finding] | str, str]:
    """The findings; or the reason why it was not read, and its remedy."""
    if not present("datasets"):
        reason, _, remedy = missing_module("datasets").partition("; ")
        return reason, remedy
    from smtrain.worker.data.read.hub import HubName, commit_of, hub_files
    from smtrain.worker.object_store import StorageError

    results: list[list[Finding] | None] = []
    errors: list[Exception] = []

    def work() -> None:
        try:
            dataset = HubName.of(uri)  # the commit is asked for first, as it fails soon
            dataset = replace(dataset, commit=commit_of(dataset))
            in_place = hub_files(dataset, lambda _: None) is not None
            results.append(list(read()) if in_place else None)
        except Exception as error:  # raised again by the thread that waits
            errors.append(error)

    thread = threading.Thread(target=work, daemon=True, name=f"check {uri}")
    thread.start()
    thread.join(HUB_S)
    prepared_anyway = "check it again with a faster network, or give files; stage prepare reads it"
    if errors and isinstance(errors[0], StorageError):
        reason, _, remedy = str(errors[0]).removeprefix(f"{uri}: ").partition("; ")
        return reason, remedy.rstrip(".") or prepared_anyway
    if errors:
        raise errors[0]
    if not results:
        return f"its records did not come within {HUB_S:.0f} s", prepared_anyway
    if results[0] is None:
        return "`datasets` would download all of it", "give files, or see what stage prepare says"
    return results[0], ""
