"""Datasets of the Hugging Face hub, `hf://NAME[:CONFIG][@SPLIT][#REVISION]`, read in place.

`datasets` lists the files of a split at one commit. Each file is a separate source and is read by
ranges, so nothing is downloaded as a whole, and several machines can share the files. Other formats
than JSON, Parquet and Arrow, and parts of a split, are loaded by `datasets` itself. The commit is
looked up once; all machines use that of the first. A data set defined by a script is read from the
hub's copy in Parquet, `hf://NAME:CONFIG@refs/convert/parquet`.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from smtrain.core.errors import DataError, SmtrainError, first_line
from smtrain.worker.object_store import StorageError, retry

HUB = "hf://"
_ANSWER = TypeVar("_ANSWER")
_READ = 8 << 20
"""Bytes per request; the hub limits the number of requests."""
_WAITS = (1, 2, 4, 8, 16, 32, 60, 120, 120)
"""Seconds before each retry, unless the hub names them."""
_FIRST_TRIES, _FIRST_S = 3, 8.0
"""Tries, and their seconds, until the hub has answered once: there may be no network, which a user
should hear soon.
"""
SILENT_S = 5
"""Seconds that the first question waits for a connection or an answer."""
AWAY = "the hub could not be reached; check the network, the proxy, HF_ENDPOINT and HF_HUB_OFFLINE"
_LATER = {408, 429, 500, 502, 503, 504}
_AT = re.compile(r"hf://datasets/(.+?)@([0-9a-f]{40})/(.+)")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_DIRECT = {"json", "parquet", "arrow"}
PARQUET_REVISION = "refs/convert/parquet"
"""The branch on which the hub keeps a copy in Parquet, CONFIG/SPLIT/*.parquet, of most public data
sets.
"""
_SCRIPT = "Dataset scripts are no longer supported"
"""The error of `datasets` from 4.0 on for a data set defined by a program."""


@dataclass(frozen=True)
class HubName:
    """The parts of an hf:// path, and the commit at which it is read, once known."""

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
        if split.startswith("refs/"):
            split, revision = "", split
        return HubName(uri, name, config or None, split, revision or None, commit)

    @property
    def parquet_copy(self) -> str:
        """The path of the hub's copy in Parquet, with the same configuration and split."""
        name = f"{HUB}{self.name}" + (f":{self.config}" if self.config else "")
        return (
            f"{name}@{self.split}#{PARQUET_REVISION}"
            if self.split
            else f"{name}@{PARQUET_REVISION}"
        )


def unpinned_datasets(sources: Sequence[object]) -> list[str]:
    """The hub datasets among the sources whose path names no commit: they may change."""
    uris = [str(source) for source in sources]
    return [
        uri
        for uri in uris
        if uri.startswith(HUB) and not _COMMIT.fullmatch(HubName.of(uri).revision or "")
    ]


def commit_of(dataset: HubName) -> str | None:
    """The commit of a dataset now; None if HF_HUB_OFFLINE is set, or for a folder of this machine.

    Raises DataError if the dataset or the revision does not exist.
    """
    if dataset.commit or _COMMIT.fullmatch(dataset.revision or ""):
        return dataset.commit or dataset.revision
    _datasets(dataset.uri)
    from huggingface_hub import HfApi, constants

    if constants.HF_HUB_OFFLINE or os.path.isdir(dataset.name):  # `datasets` reads the folder then
        return None

    def ask() -> Any:
        info = HfApi().dataset_info(dataset.name, revision=dataset.revision, timeout=_timeout())
        return info.sha

    return str(ask_hub(dataset.uri, ask, _refusal_error))


def commits_of(sources: Sequence[object]) -> dict[str, str]:
    """The current commit of each hub dataset whose path names none."""
    commits = {uri: commit_of(HubName.of(uri)) for uri in unpinned_datasets(sources)}
    return {uri: commit for uri, commit in commits.items() if commit}


def hub_files(dataset: HubName, say: Callable[[str], None]) -> list[tuple[str, str, int]] | None:
    """The path, name and bytes of each file of the split (default: train); None if `datasets` has
    to load the rows.

    `say` receives splits that are left out, and the commit if none was named. Raises DataError if
    the dataset or the split does not exist.
    """
    splits = (dataset.split or "train").split("+")
    revision, datasets = dataset.commit or dataset.revision, _datasets(dataset.uri)
    try:
        builder = datasets.load_dataset_builder(
            dataset.name, revision=revision, **_configuration(dataset)
        )
    except Exception as error:  # its own, huggingface_hub's and the network's have no common class
        raise _not_loaded(dataset, error) from None
    by_split: dict[str, list[str]] = {
        str(split): [str(p) for p in files] for split, files in _data_files(builder).items()
    }
    places = {split: [_AT.fullmatch(path) for path in paths] for split, paths in by_split.items()}
    if (
        not by_split
        or any("[" in split for split in splits)
        or not all(all(file_matches) for file_matches in places.values())
    ):
        return None
    if absent := [split for split in splits if split not in by_split]:
        raise DataError(
            f"{dataset.uri}: there is no split {absent[0]}; it has {', '.join(by_split)}."
        )
    if other_splits := sorted({*by_split} - {"train"}) if not dataset.split else []:
        _say_left_out(dataset.uri, other_splits, say)
    files = [(place[1], place[2], place[3]) for split in splits for place in places[split] if place]
    sizes: dict[tuple[str, str], dict[str, int]] = {}
    for place in dict.fromkeys((repository, commit) for repository, commit, _ in files):
        sizes[place] = _sizes(
            dataset.uri, *place, [file for *at, file in files if tuple(at) == place]
        )
    commits = {commit for _, commit in sizes}
    _say_commit(dataset, commits, say)
    return [
        (
            f"hf://datasets/{name}@{commit}/{file}",
            f"{name}@{commit[:12]}/{file}",
            sizes[name, commit][file],
        )
        for name, commit, file in files
    ]


def _configuration(dataset: HubName) -> dict[str, str | None]:
    """The options of `datasets` for a configuration, which is a folder of the converted copy.

    Raises DataError if that has several and none is named: their rows would be mixed.
    """
    if dataset.revision != PARQUET_REVISION:
        return {"name": dataset.config}
    if dataset.config:
        return {"data_dir": dataset.config}
    from huggingface_hub import HfApi
    from huggingface_hub.hf_api import RepoFolder

    def ask() -> list[str]:
        tree = HfApi().list_repo_tree(
            dataset.name, revision=dataset.commit or PARQUET_REVISION, repo_type="dataset"
        )
        return sorted(entry.path for entry in tree if isinstance(entry, RepoFolder))

    folders = ask_hub(dataset.uri, ask, _refusal_error)
    if len(folders) > 1:
        folder_names = f"{', '.join(folders[:12])}{', ...' if len(folders) > 12 else ''}"
        path = replace(dataset, config=folders[0]).parquet_copy
        raise DataError(
            f"{dataset.uri}: names no configuration, and there are {folder_names}; name one, as in"
            f" {path}"
        )
    return {"data_dir": folders[0]} if folders else {}


def _say_commit(dataset: HubName, commits: Collection[str], say: Callable[[str], None]) -> None:
    """Name the commit to read, if the path does not."""
    if dataset.revision == PARQUET_REVISION:
        say(f"{dataset.uri}: read at commit {', '.join(commits)}")
    elif dataset.revision not in commits:
        say(
            f"{dataset.uri}: read at commit {', '.join(commits)}; name it as #COMMIT to read the"
            " same again"
        )


def _say_left_out(uri: str, splits: list[str], say: Callable[[str], None]) -> None:
    """Name the splits that are not read, because the path names none."""
    bare, mark, revision = uri.partition("#")
    example = f"{bare}@SPLIT{mark}{revision}"
    say(
        f"{uri}: split {', '.join(splits)} {'is' if len(splits) == 1 else 'are'} left out; name it"
        f" as {example}"
    )


def _refusal_error(uri: str, error: Exception) -> DataError:
    """The error for a refusal by `datasets` or the hub."""
    return DataError(
        f"{uri} cannot be loaded ({first_line(error)}); check its name, that the hub can be reached"
        " and that model.token may read it, or give files."
    )


def _not_loaded(dataset: HubName, error: Exception) -> SmtrainError:
    """The error for a dataset that `datasets` does not load: StorageError if the hub is away or
    busy.
    """
    if isinstance(error, SmtrainError):
        return error
    if _SCRIPT in str(error):
        return DataError(
            f"{dataset.uri} is a script, which datasets from 4.0 on does not run; read the hub's"
            f" copy in Parquet: {dataset.parquet_copy}"
        )
    if away := _away_error(dataset.uri, error):
        return away
    refusal = _refusal_error(dataset.uri, error)
    return refusal if _least_wait(error) is None else StorageError(str(refusal))


def _datasets(uri: str) -> Any:
    """The package `datasets`. Raises DataError without it."""
    try:
        import datasets
    except ImportError:
        raise DataError(
            f"{uri} needs the package datasets; run `pip install datasets`, or give files.",
            code="package.missing",
        ) from None
    return datasets


def _data_files(builder: Any) -> dict[Any, Any]:
    """The files of each split; empty if the rows are more than the records of the files."""
    options = (getattr(builder.config, name, None) for name in ("field", "columns", "filters"))
    return {} if builder.name not in _DIRECT or any(options) else builder.config.data_files or {}


def _sizes(uri: str, repository: str, commit: str, files: list[str]) -> dict[str, int]:
    from huggingface_hub import HfApi

    api = HfApi()
    sizes: dict[str, int] = {}
    for at in range(0, len(files), 500):

        def ask(file_batch: list[str] = files[at : at + 500]) -> list[Any]:
            return list(
                api.get_paths_info(repository, file_batch, revision=commit, repo_type="dataset")
            )

        sizes |= {file_info.path: file_info.size for file_info in ask_hub(uri, ask)}
    return sizes


def hub_rows(dataset: HubName, say: Callable[[str], None]) -> list[tuple[Path, str]]:
    """Load rows with `datasets`, as (path, name) of Arrow files; the default split is train, `say`
    receives the other splits.

    A split is anything that `datasets` accepts: `train`, `train[:5%]`, `train+validation`. Raises
    DataError if it cannot be loaded.
    """
    datasets = _datasets(dataset.uri)
    try:
        rows: Any = datasets.load_dataset(
            dataset.name,
            split=dataset.split or "train",
            revision=dataset.commit or dataset.revision,
            **_configuration(dataset),
        )
    except Exception as error:  # its own, huggingface_hub's and the network's have no common class
        raise _not_loaded(dataset, error) from None
    if other_splits := sorted(set(rows.info.splits or ()) - {"train"}) if not dataset.split else []:
        _say_left_out(dataset.uri, other_splits, say)
    if dataset.commit:
        _say_commit(dataset, [dataset.commit], say)
    paths = [Path(file["filename"]) for file in rows.cache_files]
    if len(paths) == 0 or _count_rows(paths) != len(rows) or rows._indices is not None:
        paths = _save_rows(rows, dataset.uri, paths)  # only a part of the rows of the cached files
    # machines compare names and sizes; the rows of two commits may have the same ones
    base = f"{dataset.name}@{dataset.commit[:12]}" if dataset.commit else dataset.name
    return [(path, f"{base}/{path.name}") for path in paths]


def _count_rows(paths: list[Path]) -> int:
    import pyarrow as pa

    count = 0
    for path in paths:
        with pa.memory_map(str(path)) as raw, pa.ipc.open_stream(raw) as stream:
            count += sum(len(batch) for batch in stream)
    return count


def _save_rows(rows: Any, uri: str, cache: list[Path]) -> list[Path]:
    """Save the rows as files next to the cache, once, even if machines share it."""
    datasets = _datasets(uri)
    base = cache[0].parent if cache else Path(datasets.config.HF_DATASETS_CACHE)
    key = hashlib.sha256(f"{uri}\0{rows._fingerprint}\0{len(rows)}".encode()).hexdigest()[:16]
    folder = base / f"smtrain-{key}"
    if not (folder / "state.json").is_file():
        base.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f".smtrain-{key}.", dir=base))
        try:
            rows.save_to_disk(str(partial))
            partial.rename(folder)
        except OSError:
            if not (folder / "state.json").is_file():  # unless another process was faster
                raise
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return sorted(folder.glob("data-*.arrow"))


def open_hub_file(path: str) -> Any:
    """A seekable `pyarrow.NativeFile` of a file hf://datasets/NAME@COMMIT/FILE."""
    import pyarrow as pa

    return pa.PythonFile(_Ranges(path), mode="r")


class _Ranges:
    """A file of the hub, read by ranges; a refusal by the hub is a DataError."""

    def __init__(self, path: str) -> None:
        from huggingface_hub import HfFileSystem

        self._path = path
        self._file: Any = ask_hub(path, lambda: HfFileSystem().open(path, "rb", block_size=_READ))

    def read(self, count: int = -1) -> bytes:
        return bytes(ask_hub(self._path, lambda: self._file.read(count)))

    def seek(self, to: int, whence: int = 0) -> int:
        return int(self._file.seek(to, whence))

    def tell(self) -> int:
        return int(self._file.tell())

    @property
    def closed(self) -> bool:
        return bool(self._file.closed)

    def close(self) -> None:
        self._file.close()


def _read_error(uri: str, error: Exception) -> DataError:
    return DataError(
        f"{uri} cannot be read ({first_line(error)}); check that the hub can be reached."
    )


def ask_hub(
    uri: str,
    ask: Callable[[], _ANSWER],
    refusal_error: Callable[[str, Exception], DataError] = _read_error,
) -> _ANSWER:
    """Ask the hub; retry while it is busy, limits the rate or cannot be reached.

    Raises the DataError that `refusal_error` makes if it refuses, StorageError if it does not
    answer for minutes, or has never answered and cannot be reached for some seconds.
    """
    failures, began = 0, time.monotonic()

    def least_wait(error: Exception) -> float | None:
        nonlocal failures
        failures += 1
        if not is_away(error):
            _has_answered.set()
        is_over = failures >= _FIRST_TRIES or time.monotonic() - began > _FIRST_S
        return None if is_over and not _has_answered.is_set() else _least_wait(error)

    try:
        answer = retry(ask, _WAITS, least_wait)
    except Exception as error:
        if _least_wait(error) is None:
            raise refusal_error(uri, error) from None
        raise _away_error(uri, error) or StorageError(str(_read_error(uri, error))) from None
    _has_answered.set()
    return answer


_has_answered = threading.Event()
"""Whether the hub has answered this process."""


def _timeout() -> float | None:
    """Seconds of the next question; None for the client's default, once the hub has answered."""
    return None if _has_answered.is_set() else SILENT_S


def _away_error(uri: str, error: Exception) -> StorageError | None:
    return (
        StorageError(f"{uri}: {AWAY}, or give files ({first_line(error)}).")
        if is_away(error)
        else None
    )


def is_away(error: BaseException) -> bool:
    """Whether no answer came: no network, no such host, a silent proxy or hub.

    httpx, requests and huggingface_hub share no class.
    """
    if getattr(getattr(error, "response", None), "status_code", None) is not None:
        return False
    if error.__cause__ is not None and is_away(error.__cause__):
        return True
    return isinstance(error, (ConnectionError, TimeoutError)) or type(error).__module__.startswith(
        ("httpx", "requests", "urllib3")
    )


def _least_wait(error: Exception) -> float | None:
    """The seconds that a busy hub names; None if it refuses."""
    answer = getattr(error, "response", None)
    status = getattr(answer, "status_code", None)
    if not (status in _LATER or is_away(error)):
        return None
    retry_after = str(getattr(answer, "headers", {}).get("Retry-After", ""))
    return float(retry_after) if retry_after.isdecimal() else 0.0
