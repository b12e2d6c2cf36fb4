"""Reads and calls that outlast errors of an object store, of the network and of mounted file
systems.

pyarrow repeats a request for some six seconds, and never if the answer is smaller than the error's
text. So each call here is repeated with a growing pause, and reading resumes at the byte that it
has reached.
"""

from __future__ import annotations

import errno
import random
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from smtrain.core.errors import DataError, SmtrainError, first_line, read_remedy

T = TypeVar("T")
WAITS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0)
"""Seconds before each further try: about a minute in all, as long as S3 takes to scale a busy
prefix.
"""
AWAY = "S3 could not be reached; check the network, the proxy and the region"
_CREDENTIALS_REMEDY = (
    "S3 refuses it to these credentials, which may have expired; log in (`aws configure` or `aws"
    " sso login`), and see that they allow s3:ListBucket and s3:GetObject there"
)
_ABSENT = "there is no such bucket or prefix; check its name and the region"
_CLOCK = "S3 refuses it because the clock of this machine is wrong; set it"
_NOT_THERE = {"NO_SUCH_BUCKET": _ABSENT, "RESOURCE_NOT_FOUND": _ABSENT, "NO_SUCH_KEY": _ABSENT}
_FINAL = _NOT_THERE | {
    "ACCESS_DENIED": _CREDENTIALS_REMEDY,
    "INVALID_ACCESS_KEY_ID": _CREDENTIALS_REMEDY,
    "INVALID_CLIENT_TOKEN_ID": _CREDENTIALS_REMEDY,
    "SIGNATURE_DOES_NOT_MATCH": _CREDENTIALS_REMEDY,
    "MISSING_AUTHENTICATION_TOKEN": _CREDENTIALS_REMEDY,
    "ExpiredToken": _CREDENTIALS_REMEDY,
    "InvalidToken": _CREDENTIALS_REMEDY,
    "HTTP 400": _CREDENTIALS_REMEDY,
    "REQUEST_TIME_TOO_SKEWED": _CLOCK,
}
"""Answers that are the same at each try."""
_LATER = {
    "NETWORK_CONNECTION": AWAY,
    "REQUEST_TIMEOUT": AWAY,
    "SLOW_DOWN": "S3 asks to wait; try again in a minute",
}
_ANSWER = re.compile(
    r"AWS Error (\w+)(?: \(HTTP status (\d+)\))? during (\w+) operation(.*)", re.DOTALL
)
_EXCEPTION_NAME = re.compile(r"Unable to parse ExceptionName: (\w+)")
_NETWORK_FILE_SYSTEMS = ("fuse", "nfs", "lustre", "cifs", "smb", "ceph", "gpfs", "beegfs", "9p")
_OF_MACHINE = {
    errno.EIO,
    errno.ESTALE,
    errno.ETIMEDOUT,
    errno.ENOTCONN,
    errno.ECONNRESET,
    errno.EHOSTDOWN,
}


class StorageError(SmtrainError):
    """A store, the network or a disk fails, not the text: finished work is kept, and another
    attempt may succeed.
    """

    damaged = False
    """The same attempt would fail again: a file is not what was written, and has to be made again.
    """


def _answer(error: BaseException) -> str:
    """The name of S3's answer in an error of pyarrow; "" if it is none."""
    match = _ANSWER.search(str(error))
    if match is None or match[1] != "UNKNOWN":
        return match[1] if match else ""
    if name_match := _EXCEPTION_NAME.search(match[4]):
        return name_match[1]
    # S3 answers HEAD without a name, and a small read has no room for it; a read's 400 is of
    # expired credentials
    return "HTTP 400" if match[2] == "400" and match[3] in ("GetObject", "HeadObject") else match[1]


def is_of_store(error: BaseException) -> bool:
    """Whether an error is an answer of S3, and not about the content of a file."""
    return _answer(error) != ""


def is_of_machine(error: BaseException) -> bool:
    """Whether a disk or a network file system failed, such as NFS or FastFile."""
    return isinstance(error, OSError) and error.errno in _OF_MACHINE


def is_absent(error: BaseException) -> bool:
    """Whether an object or its bucket does not exist."""
    return isinstance(error, FileNotFoundError) or _answer(error) in _NOT_THERE


def is_final(error: BaseException) -> bool:
    """Whether another try would fail in the same way: the object does not exist, or the store
    refuses the call.
    """
    return isinstance(error, (FileNotFoundError, PermissionError)) or _answer(error) in _FINAL


def may_pass(error: Exception) -> float | None:
    """Return the least seconds before another try of a read or call; None if it would fail in the
    same way.

    Errors of a machine have a number, those of pyarrow's clients do not.
    """
    if not isinstance(error, OSError) or is_final(error):
        return None
    return 0.0 if error.errno is None or is_of_machine(error) else None


def explain(error: BaseException) -> str:
    """An error of the store or the network with a remedy, without its full stop."""
    if is_of_machine(error):
        return (
            f"{first_line(error)}; see that its disk or channel works, and run the same command"
            " again"
        )
    match = _ANSWER.search(str(error))
    if match is None:
        return f"{first_line(error)}; check the URI and your permissions"
    name = _answer(error)
    if remedy := (_FINAL | _LATER).get(name):
        return remedy
    if name in ("UNKNOWN", "INTERNAL_FAILURE"):
        status = f"HTTP {match[2]}" if match[2] else "an internal error"
        return f"S3 answered {match[3]} with {status}; try again in a minute"
    return f"S3 answered {match[3]} with {name}; check the URI and your permissions"


def retry(
    call: Callable[[], T],
    waits: Sequence[float] = WAITS,
    min_wait: Callable[[Exception], float | None] = may_pass,
) -> T:
    """Call until it succeeds, again after each of `waits`, or after `min_wait(error)` seconds if
    that is longer.

    Raises the error of the last try, or one for which `min_wait` returns None.
    """
    for wait in (*waits, None):
        try:
            return call()
        except Exception as error:
            if wait is None or (seconds := min_wait(error)) is None:
                raise
            time.sleep(max(seconds, wait * random.uniform(0.5, 1.0)))
    raise AssertionError("the last try has returned or raised")


class SteadyFile:
    """A seekable file whose failed reads are tried again from their start, for Python and for
    pyarrow's readers.

    `open_input` opens a file of pyarrow, which has `size` and `read_at`. Raises StorageError if the
    store or the machine fails for good, so that no reader takes it for a fault of the content, and
    OSError if there is no such file.
    """

    def __init__(self, open_input: Callable[[], Any], name: str) -> None:
        self._open, self._name, self._at = open_input, name, 0
        self._file: Any = self._retry(open_input)
        self._size = int(self._file.size())

    def read(self, count: int = -1) -> bytes:
        bytes_left = max(0, self._size - self._at)
        size = bytes_left if count is None or count < 0 else min(count, bytes_left)
        data = self._retry(lambda: self._read(size)) if size else b""
        self._at += len(data)
        return data

    def _retry(self, call: Callable[[], T]) -> T:
        try:
            return retry(call)
        except OSError as error:
            if is_absent(error) or (may_pass(error) is None and not is_of_store(error)):
                raise
            raise StorageError(f"{self._name} cannot be read: {explain(error)}.") from error

    def _read(self, count: int) -> bytes:
        """Read at the present place; the file is opened again after an error."""
        try:
            if self._file is None:
                self._file = self._open()
            data = bytes(self._file.read_at(count, self._at))
            if len(data) != count:
                raise OSError(f"{len(data)} of {count} bytes arrived")
        except OSError:
            self._file = None
            raise
        return data

    def seek(self, to: int, whence: int = 0) -> int:
        self._at = to + (0, self._at, self._size)[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def size(self) -> int:
        return self._size

    def readable(self) -> bool:
        return True

    def writable(self) -> bool:
        return False

    def seekable(self) -> bool:
        return True

    closed = False

    def close(self) -> None:
        self._file, self.closed = None, True

    def __enter__(self) -> SteadyFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_file(filesystem: Any, path: str, name: str) -> SteadyFile:
    """A file of a file system of pyarrow, which `name` names in errors. Raises as `SteadyFile`."""
    return SteadyFile(lambda: filesystem.open_input_file(path), name)


def kind_of_mount(path: Path) -> str:
    """The type of the file system that a path lies on, as `fuse.mount-s3` or `nfs4`; "" if it is
    unknown.
    """
    try:
        mounts = [line.split()[1:3] for line in Path("/proc/self/mounts").read_text().splitlines()]
    except OSError:
        return ""
    full_path = str(path.resolve())
    mounts_above = [
        (len(point), kind)
        for point, kind in mounts
        if full_path == point or full_path.startswith(point.rstrip("/") + "/")
    ]
    return max(mounts_above, default=(0, ""))[1]


def is_remote(path: Path) -> bool:
    """Whether reads of a path go through a network, as those of a FastFile channel do."""
    return kind_of_mount(path).startswith(_NETWORK_FILE_SYSTEMS)


def unreadable_error(path: Path | str, error: Exception, remedy: str) -> SmtrainError:
    """The error for a file that cannot be read: DataError with a remedy, StorageError if the store
    or machine fails.
    """
    if is_of_store(error) or is_of_machine(error):
        error_class = DataError if is_absent(error) else StorageError
        return error_class(f"{path} cannot be read: {explain(error)}.")
    reason = getattr(error, "strerror", None) or first_line(error)
    return DataError(f"{path} cannot be read ({reason}); {read_remedy(error, remedy)}.")
