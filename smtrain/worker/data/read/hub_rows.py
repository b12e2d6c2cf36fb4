"""Rows of a data set of the hub that its files do not tell by themselves: `datasets` loads them, as Arrow files."""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from smtrain.worker.data.read.hub import HubName, cannot, left_out, needs_datasets, read_at


def hub_rows(asked: HubName, say: Callable[[str], None]) -> list[tuple[Path, str]]:
    """(path, name) of the Arrow files; the split is `train` where none is named, and `say` hears of the others.

    A split is anything that `datasets` takes: `train`, `train[:5%]`, `train+validation`. Raises DataError where it
    cannot be loaded.
    """
    datasets = needs_datasets(asked.uri)
    try:
        found: Any = datasets.load_dataset(
            asked.name, asked.config, split=asked.split or "train", revision=asked.commit or asked.revision
        )
    except Exception as error:  # its own, huggingface_hub's and the network's have no common class
        raise cannot(asked.uri, error) from None
    if others := sorted(set(found.info.splits or ()) - {"train"}) if not asked.split else []:
        left_out(asked.uri, others, say)
    if asked.commit:
        read_at(asked, [asked.commit], say)
    paths = [Path(file["filename"]) for file in found.cache_files]
    if len(paths) == 0 or _rows(paths) != len(found) or found._indices is not None:
        paths = _written(found, asked.uri, paths)  # a part of the rows, which the files of the cache do not say
    # machines compare names and sizes, which the rows of two commits may share
    base = f"{asked.name}@{asked.commit[:12]}" if asked.commit else asked.name
    return [(path, f"{base}/{path.name}") for path in paths]


def _rows(paths: list[Path]) -> int:
    import pyarrow as pa

    count = 0
    for path in paths:
        with pa.memory_map(str(path)) as raw, pa.ipc.open_stream(raw) as stream:
            count += sum(len(batch) for batch in stream)
    return count


def _written(found: Any, uri: str, cache: list[Path]) -> list[Path]:
    """The rows as files of their own beside the cache, written once, also where machines share it."""
    datasets = needs_datasets(uri)
    base = cache[0].parent if cache else Path(datasets.config.HF_DATASETS_CACHE)
    key = hashlib.sha256(f"{uri}\0{found._fingerprint}\0{len(found)}".encode()).hexdigest()[:16]
    folder = base / f"smtrain-{key}"
    if not (folder / "state.json").is_file():
        base.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f".smtrain-{key}.", dir=base))
        try:
            found.save_to_disk(str(partial))
            partial.rename(folder)
        except OSError:
            if not (folder / "state.json").is_file():  # or another was faster
                raise
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return sorted(folder.glob("data-*.arrow"))
