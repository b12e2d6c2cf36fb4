"""Calls of an object store that outlast its errors and those of the network.

pyarrow tries a request three times, and never again if the answer is smaller than the error's text. So each call here
is repeated with a growing pause, and reading resumes at the byte that it has reached.
"""

from __future__ import annotations

import errno
import random
import re
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from smtrain.core.errors import SmtrainError, first_line

T = TypeVar("T")
WAITS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0)
"""Seconds before each further try: about a minute in all, as long as S3 takes to scale a busy prefix."""
AWAY = "S3 could not be reached; check the network, the proxy and the region"
_REFUSED = (
    "S3 refuses it to these credentials; log in (`aws configure` or `aws sso login`), and see that they allow "
    "s3:ListBucket and s3:GetObject there"
)
_ABSENT = "there is no such bucket or prefix; check its name and the region"
_FINAL = {
    "ACCESS_DENIED": _REFUSED, "INVALID_ACCESS_KEY_ID": _REFUSED, "INVALID_CLIENT_TOKEN_ID": _REFUSED,
    "SIGNATURE_DOES_NOT_MATCH": _REFUSED, "MISSING_AUTHENTICATION_TOKEN": _REFUSED, "NO_SUCH_BUCKET": _ABSENT,
    "RESOURCE_NOT_FOUND": _ABSENT, "NO_SUCH_KEY": _ABSENT,
}  # fmt: skip
"""Answers that are the same at each try."""
_LATER = {
    "NETWORK_CONNECTION": AWAY, "REQUEST_TIMEOUT": AWAY, "SLOW_DOWN": "S3 asks to wait; try again in a minute",
}  # fmt: skip
_ANSWER = re.compile(r"AWS Error (\w+) during (\w+) operation")
_OF_MACHINE = {errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENOTCONN, errno.ECONNRESET, errno.EHOSTDOWN}


class StorageError(SmtrainError):
    """A store, the network or a disk fails, not the text: finished work is kept, and another attempt may succeed."""

    damaged = False
    """The same attempt would fail again: a file is not what was written, and has to be made again."""


def is_of_store(error: BaseException) -> bool:
    """Whether an error is an answer of S3, and not about the content of a file."""
    return _ANSWER.search(str(error)) is not None


def is_of_machine(error: BaseException) -> bool:
    """Whether a disk or a network file system failed, such as NFS or FastFile."""
    return isinstance(error, OSError) and error.errno in _OF_MACHINE


def is_final(error: BaseException) -> bool:
    """Whether another try would fail in the same way: the object does not exist, or the store refuses the call."""
    match = _ANSWER.search(str(error))
    return isinstance(error, (FileNotFoundError, PermissionError)) or (match is not None and match[1] in _FINAL)


def explain(error: BaseException) -> str:
    """An error of the store or the network with a remedy, without its full stop."""
    match = _ANSWER.search(str(error))
    if match is None:
        return f"{first_line(error)}; check the URI and your permissions"
    return (_FINAL | _LATER).get(match[1]) or (
        f"S3 answered {match[2]} with {match[1]}; check the URI and your permissions"
    )


def retry(call: Callable[[], T], waits: Sequence[float] = WAITS) -> T:
    """Call until it succeeds, again after each of `waits`. Raises the OSError of the last try, or one that is final."""
    for wait in (*waits, None):
        try:
            return call()
        except OSError as error:
            if wait is None or is_final(error):
                raise
            time.sleep(wait * random.uniform(0.5, 1.0))
    raise AssertionError("the last try has returned or raised")


class StoreFile:
    """A seekable file of an object store for `pyarrow.PythonFile`; a read that fails is tried again from its start."""

    def __init__(self, filesystem: Any, path: str) -> None:
        self._filesystem, self._path, self._at = filesystem, path, 0
        self._file: Any = retry(lambda: filesystem.open_input_file(path))
        self._size = int(self._file.size())

    def read(self, count: int = -1) -> bytes:
        wanted = self._size - self._at if count is None or count < 0 else count
        data = retry(lambda: self._read(wanted))
        self._at += len(data)
        return data

    def _read(self, count: int) -> bytes:
        """Read at the present place; the client's file is opened again after an error."""
        try:
            if self._file is None:
                self._file = self._filesystem.open_input_file(self._path)
            return bytes(self._file.read_at(count, self._at))
        except OSError:
            self._file = None
            raise

    def seek(self, to: int, whence: int = 0) -> int:
        self._at = to + (0, self._at, self._size)[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def size(self) -> int:
        return self._size

    closed = False

    def close(self) -> None:
        self._file, self.closed = None, True


def open_file(filesystem: Any, path: str) -> Any:
    """A seekable `pyarrow.NativeFile` of an object. Raises OSError."""
    import pyarrow as pa

    return pa.PythonFile(StoreFile(filesystem, path), mode="r")
