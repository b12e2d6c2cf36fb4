"""Files on this machine: smtrain's folder, atomic writes, and errors of a full or failing disk."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shutil
import stat
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, BinaryIO

from smtrain.core.errors import Code, Sentence, SmtrainError
from smtrain.core.text import with_article

_SAYS = {
    errno.ENOSPC: "no space left on {place}: free some, then run the same command again",
    errno.EDQUOT: (
        "the disk quota is used up at {place}: free some, then run the same command again"
    ),
    errno.EROFS: "{place} is read-only: make it writable, then run the same command again",
    errno.EIO: (
        "input/output error on {place}: look at the disk (`dmesg`), then run the same command again"
    ),
}
# The same errors in the words of libraries that do not raise OSError (SQLite, Rust, C++).
_ERRNO_PATTERNS = (
    (re.compile(r"no space left|os error 28\b|database or disk is full", re.I), errno.ENOSPC),
    (re.compile(r"disk quota exceeded|os error 122\b", re.I), errno.EDQUOT),
    (re.compile(r"read-?only (file system|database)|os error 30\b", re.I), errno.EROFS),
    (
        re.compile(r"input/output error|disk i/o error|unable to open database|os error 5\b", re.I),
        errno.EIO,
    ),
)
_PROBE_BYTES = 1 << 16
MOST_JSON = 256 << 20
"""Bytes of the largest JSON file to read whole: a tokenizer.json has 30 MB, a manifest 200
bytes a file.
"""


def home_path() -> Path:
    """smtrain's folder, which may not exist: for readers, such as a plan."""
    return Path(os.environ.get("SMTRAIN_HOME") or Path.home() / ".smtrain")


def home() -> Path:
    """smtrain's folder, created with mode 0700 if needed. Raises `SmtrainError` if that fails."""
    folder = home_path()
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        reason = "it is a file" if folder.is_file() else error.strerror
        raise SmtrainError(
            f"{folder} cannot be made ({reason}); set SMTRAIN_HOME to a folder you can write",
            code="disk.unwritable",
        ) from None
    return folder


@contextlib.contextmanager
def replacing(path: Path, *, mode: int = 0o666, sync: bool = True) -> Iterator[IO[Any]]:
    """Open a binary file that replaces `path` when the block ends: readers see either the old
    bytes or the new ones.

    It is written under another name in the same folder and removed if the block raises.

    Args:
        path: The file; its folder must exist.
        mode: Permissions of the new file, before the umask.
        sync: Flush the bytes and the folder's entry to the disk, so that both outlast a power cut.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}.{os.urandom(4).hex()}")
    try:
        with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as handle:
            yield handle
            if sync:
                handle.flush()
                os.fsync(handle.fileno())
        os.replace(part, path)
    except BaseException as error:
        if isinstance(error, OSError) and error.filename == str(part):  # the user knows only `path`
            error.filename = str(path if path.parent.is_dir() else path.parent)
        part.unlink(missing_ok=True)
        raise
    if sync:
        sync_folder(path.parent)


def hold(path: Path) -> int | None:
    """Make a file if needed, and hold it for this process until its descriptor, which is returned,
    is closed.

    None if another process holds it, or removed it a moment before.
    """
    import fcntl  # only Unix has it

    handle = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
    with contextlib.suppress(OSError):
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(handle), path.stat()):
            return handle
    os.close(handle)
    return None


@contextlib.contextmanager
def only_writer(
    output: Path | str, error: type[SmtrainError], lock: Path | None = None
) -> Iterator[None]:
    """Hold an output for this process until the block ends, by the file `lock`; default: a hidden
    file next to it.

    Makes the folder of that file if needed. Raises `error` if another process holds it.
    """
    path = lock or Path(output).with_name(f".{Path(output).name}.lock")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = hold(path)
    except OSError as problem:
        if problem.filename == str(path):
            problem.filename = str(output)  # users do not know the lock
        raise
    if handle is None:
        raise error(f"{output} is being written by another process; wait until it has ended")
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(handle)


@contextlib.contextmanager
def replacing_files(folder: Path, name: str, *other_patterns: str) -> Iterator[Path]:
    """Yield a new folder, whose files replace what has this name, or matches the `other_patterns`,
    in `folder` at the end.

    The old files go before the first new one, `name`, comes, so a kill leaves no mixture. Nothing
    is replaced if the block raises. The caller is the only writer.
    """
    folder.mkdir(parents=True, exist_ok=True)
    part = folder / f".{name}.part"
    shutil.rmtree(part, ignore_errors=True)  # of a process that was killed
    part.mkdir()
    try:
        yield part
        for old in {path for pattern in (name, *other_patterns) for path in folder.glob(pattern)}:
            shutil.rmtree(old) if old.is_dir() and not old.is_symlink() else old.unlink()
        for new in sorted(part.iterdir(), key=lambda path: (path.name != name, path.name)):
            os.replace(new, folder / new.name)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def write_atomically(
    path: Path, content: str | bytes, *, mode: int = 0o666, sync: bool = True
) -> None:
    """Replace a file's content as `replacing` does; text is written as UTF-8."""
    with replacing(path, mode=mode, sync=sync) as handle:
        handle.write(content.encode() if isinstance(content, str) else content)


def open_regular_file(path: Path, *, links: bool = True) -> BinaryIO:
    """Open a regular file for reading.

    Raises OSError for anything else, without waiting for a named pipe.
    """
    follow = 0 if links else os.O_NOFOLLOW
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | follow)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return os.fdopen(descriptor, "rb")


_OF_SHELL = ("/dev/fd/", "/dev/stdin", "/proc/self/fd/")


def open_named(path: Path) -> BinaryIO:
    """Open a file that a person named: a regular one, or a shell's <(command) or < file.

    Raises OSError otherwise.
    """
    return path.open("rb") if str(path).startswith(_OF_SHELL) else open_regular_file(path)


def read_whole(path: Path, max_bytes: int = MOST_JSON) -> str:
    """The text of a file that `open_named` opens, of at most `max_bytes` bytes in UTF-8.

    Raises OSError if it cannot be opened, and ValueError for any other content.
    """
    with open_named(path) as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise ValueError(f"it has more than {max_bytes:,} bytes")
    return content.decode()


def parse_json(text: str | bytes) -> Any:
    """The value of a JSON text; raises ValueError for any other text, and for values that are
    nested too deeply.

    Text that a person or another program may have changed is parsed by this: json.loads raises
    RecursionError too.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("its values are nested too deeply") from None


def parse_object(text: str | bytes) -> dict[str, Any]:
    """The object of a JSON text, as `parse_json`; raises ValueError for another value."""
    value = parse_json(text)
    if not isinstance(value, dict):
        raise ValueError(f"it holds {with_article(type(value).__name__)}, no JSON object")
    return value


def read_value(path: Path, max_bytes: int = MOST_JSON) -> Any:
    """The value in a JSON file; raises OSError and ValueError as `read_whole`."""
    return parse_json(read_whole(path, max_bytes))


def read_object(path: Path, max_bytes: int = MOST_JSON) -> dict[str, Any]:
    """The object in a JSON file, as `read_value`; raises ValueError for another value."""
    return parse_object(read_whole(path, max_bytes))


def sync_folder(folder: Path) -> None:
    """Make renames and deletions in a folder last through a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def no_folder_fault(folder: Path) -> str | None:
    """The fault and the remedy if a file cannot be written into this folder; None if it is one."""
    if folder.is_dir():
        return None
    if folder.exists():
        return f"{folder} is a file, not a folder; name a file in a folder"
    return f"{folder}: no such folder; make it first"


def probe(folder: Path) -> None:
    """Raise OSError if the disk of this folder cannot be written to."""
    file = folder / f".probe-{os.getpid()}-{threading.get_ident()}"
    try:
        with open(file, "wb", buffering=0) as handle:
            if handle.write(bytes(_PROBE_BYTES)) < _PROBE_BYTES:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(handle.fileno())
    except OSError as error:
        error.filename = str(folder)
        raise
    finally:
        file.unlink(missing_ok=True)


def disk_number(error: BaseException) -> int | None:
    """The errno of a full, read-only or failing disk anywhere in an error's chain of causes; None
    for other errors.
    """
    for cause in _causes(error):
        if isinstance(cause, OSError) and cause.errno in _SAYS:
            return cause.errno
        if not isinstance(cause, OSError) or cause.errno is None:
            for pattern, number in _ERRNO_PATTERNS:
                if pattern.search(str(cause)):
                    return number
    return None


def disk_sentence(error: BaseException, place: str | Path | None = None) -> str | None:
    """A sentence about a full, read-only or failing disk, else None; `place` is used if the error
    names no file.
    """
    number = disk_number(error)
    if number is None:
        return None
    places = (
        str(e.filename)
        for e in _causes(error)
        if isinstance(e, OSError) and isinstance(e.filename, str)
    )
    code: Code = "disk.full" if number in (errno.ENOSPC, errno.EDQUOT) else "disk.unwritable"
    return Sentence(_SAYS[number].format(place=next(places, None) or place or "the disk"), code)


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    seen_ids: set[int] = set()
    while error is not None and id(error) not in seen_ids:
        seen_ids.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def files_below(folder: Path) -> Iterator[Path]:
    """All files below a folder, as `rglob` but for any depth: links to files too, and no folder
    behind a link.
    """
    folders = [folder]
    while folders:
        for path in folders.pop().iterdir():
            if path.is_file():
                yield path
            elif path.is_dir() and not path.is_symlink():
                folders.append(path)
