"""Data sets of the Hugging Face hub, `hf://NAME[:CONFIG][@SPLIT][#REVISION]`, read file by file where they lie.

`datasets` says which files a split has, at one commit; each is a source of its own, read by ranges, so that nothing is
downloaded as a whole and several machines share them as they share files. Files of other forms than JSON, Parquet and
Arrow, and parts of a split, are left to `datasets` itself (hub_rows). All of it is read at one commit, which is asked
for once: several machines take the one that the first of them was told.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from smtrain.core.errors import DataError, first_line

HUB = "hf://"
_ANSWER = TypeVar("_ANSWER")
_READ = 8 << 20
"""Bytes asked for at once: requests are what the hub limits."""
_WAITS = (1, 2, 4, 8, 16, 32, 60, 120, 120)
"""Seconds before the next try, where the hub does not name them."""
_LATER = {408, 429, 500, 502, 503, 504}
_AT = re.compile(r"hf://datasets/(.+?)@([0-9a-f]{40})/(.+)")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_DIRECT = {"json", "parquet", "arrow"}


@dataclass(frozen=True)
class HubName:
    """What an hf:// path of data names, and the commit at which it is read, once it is known."""

    uri: str
    name: str
    config: str | None
    split: str
    revision: str | None
    commit: str | None = None

    @staticmethod
    def of(uri: str, commit: str | None = None) -> HubName:
        body, _, revision = uri.removeprefix(HUB).partition("#")
        name, _, split = body.partition("@")
        name, _, config = name.partition(":")
        return HubName(uri, name, config or None, split, revision or None, commit)


def floating(sources: Sequence[object]) -> list[str]:
    """Those of the sources that are data sets of the hub whose path names no commit: what they are may change."""
    named = [str(source) for source in sources]
    return [uri for uri in named if uri.startswith(HUB) and not _COMMIT.fullmatch(HubName.of(uri).revision or "")]


def commit_of(asked: HubName) -> str | None:
    """The commit that is meant now; None where the hub is not to be asked: HF_HUB_OFFLINE, or a folder of this machine.

    Raises DataError where the data set or the revision is not there.
    """
    if asked.commit or _COMMIT.fullmatch(asked.revision or ""):
        return asked.commit or asked.revision
    needs_datasets(asked.uri)
    from huggingface_hub import HfApi, constants

    if constants.HF_HUB_OFFLINE or os.path.isdir(asked.name):  # which `datasets` takes for the data set
        return None

    def ask() -> Any:
        return HfApi().dataset_info(asked.name, revision=asked.revision).sha

    return str(patiently(asked.uri, ask, cannot))


def commits_of(sources: Sequence[object]) -> dict[str, str]:
    """The commit that each data set of the hub without one in its path is read at from now on."""
    found = {uri: commit_of(HubName.of(uri)) for uri in floating(sources)}
    return {uri: commit for uri, commit in found.items() if commit}


@dataclass(frozen=True)
class HubFile:
    """A file of a data set: `path` is hf://datasets/NAME@COMMIT/FILE, or of this machine."""

    path: str
    name: str
    bytes: int


def hub_files(asked: HubName, say: Callable[[str], None]) -> list[HubFile] | None:
    """The files of the split, `train` where none is named, in their order; None where `datasets` is to load the rows.

    `say` hears of splits that are left out, and of the commit where none was named. Raises DataError where the data set
    or the split is not there.
    """
    splits = (asked.split or "train").split("+")
    builder = _builder(asked)
    found: dict[str, list[str]] = {str(split): [str(p) for p in files] for split, files in _data_files(builder).items()}
    places = {split: [_AT.fullmatch(path) for path in paths] for split, paths in found.items()}
    if not found or any("[" in split for split in splits) or not all(all(some) for some in places.values()):
        return None
    if absent := [split for split in splits if split not in found]:
        raise DataError(f"{asked.uri}: there is no split {absent[0]}; it has {', '.join(found)}.")
    if others := sorted({*found} - {"train"}) if not asked.split else []:
        left_out(asked.uri, others, say)
    files = [(place[1], place[2], place[3]) for split in splits for place in places[split] if place]
    sizes: dict[tuple[str, str], dict[str, int]] = {}
    for place in dict.fromkeys((repository, commit) for repository, commit, _ in files):
        sizes[place] = _sizes(asked.uri, *place, [file for *at, file in files if tuple(at) == place])
    commits = {commit for _, commit in sizes}
    read_at(asked, commits, say)
    return [
        HubFile(f"hf://datasets/{name}@{commit}/{file}", f"{name}@{commit[:12]}/{file}", sizes[name, commit][file])
        for name, commit, file in files
    ]


def read_at(asked: HubName, commits: Collection[str], say: Callable[[str], None]) -> None:
    """Tell of the commit that is read, where the path names none."""
    if asked.revision not in commits:
        say(f"{asked.uri}: read at commit {', '.join(commits)}; name it as #COMMIT to read the same again")


def left_out(uri: str, splits: list[str], say: Callable[[str], None]) -> None:
    """Tell of splits that are not read, as none was named."""
    bare, mark, revision = uri.partition("#")
    named = f"{bare}@SPLIT{mark}{revision}"
    say(f"{uri}: split {', '.join(splits)} {'is' if len(splits) == 1 else 'are'} left out; name it as {named}")


def cannot(uri: str, error: Exception) -> DataError:
    """What to raise where `datasets` or the hub refuses."""
    return DataError(
        f"{uri} cannot be loaded ({first_line(error)}); check its name, that the hub can be reached and that "
        "model.token may read it, or give files."
    )


def needs_datasets(uri: str) -> Any:
    """The package `datasets`. Raises DataError without it."""
    try:
        import datasets
    except ImportError:
        raise DataError(f"{uri} needs the package datasets; run `pip install datasets`, or give files.") from None
    return datasets


def _builder(asked: HubName) -> Any:
    datasets = needs_datasets(asked.uri)
    try:
        return datasets.load_dataset_builder(asked.name, asked.config, revision=asked.commit or asked.revision)
    except Exception as error:  # its own, huggingface_hub's and the network's have no common class
        raise cannot(asked.uri, error) from None


def _data_files(builder: Any) -> dict[Any, Any]:
    """The files of each split; none where their records are not the rows by themselves."""
    options = (getattr(builder.config, name, None) for name in ("field", "columns", "filters"))
    return {} if builder.name not in _DIRECT or any(options) else builder.config.data_files or {}


def _sizes(uri: str, repository: str, commit: str, files: list[str]) -> dict[str, int]:
    from huggingface_hub import HfApi

    api = HfApi()
    found: dict[str, int] = {}
    for at in range(0, len(files), 500):

        def asked(some: list[str] = files[at : at + 500]) -> list[Any]:
            return list(api.get_paths_info(repository, some, revision=commit, repo_type="dataset"))

        found |= {about.path: about.size for about in patiently(uri, asked)}
    return found


def opened(path: str) -> Any:
    """A seekable `pyarrow.NativeFile` of a file hf://datasets/NAME@COMMIT/FILE."""
    import pyarrow as pa

    return pa.PythonFile(_Ranges(path), mode="r")


class _Ranges:
    """A file of the hub, read by ranges; what the hub refuses is a DataError."""

    def __init__(self, path: str) -> None:
        from huggingface_hub import HfFileSystem

        self._path = path
        self._file: Any = patiently(path, lambda: HfFileSystem().open(path, "rb", block_size=_READ))

    def read(self, count: int = -1) -> bytes:
        return bytes(patiently(self._path, lambda: self._file.read(count)))

    def seek(self, to: int, whence: int = 0) -> int:
        return int(self._file.seek(to, whence))

    def tell(self) -> int:
        return int(self._file.tell())

    @property
    def closed(self) -> bool:
        return bool(self._file.closed)

    def close(self) -> None:
        self._file.close()


def _unread(uri: str, error: Exception) -> DataError:
    return DataError(f"{uri} cannot be read ({first_line(error)}); check that the hub can be reached.")


def patiently(
    uri: str, ask: Callable[[], _ANSWER], refused: Callable[[str, Exception], DataError] = _unread
) -> _ANSWER:
    """What the hub answers; where it is busy, limits the rate or cannot be reached, after a while.

    Raises the DataError that `refused` makes where it refuses, or does not answer for minutes.
    """
    for wait in (*_WAITS, None):
        try:
            return ask()
        except Exception as error:  # httpx's, requests' and huggingface_hub's have no common class
            answer = getattr(error, "response", None)
            status = getattr(answer, "status_code", None)
            away = isinstance(error, (ConnectionError, TimeoutError)) or type(error).__module__.startswith(
                ("httpx", "requests", "urllib3")
            )
            if wait is None or not (status in _LATER or (status is None and away)):
                raise refused(uri, error) from None
            named = str(getattr(answer, "headers", {}).get("Retry-After", ""))
            time.sleep(int(named) if named.isdecimal() else wait)
    raise AssertionError("the last try has returned or raised")
