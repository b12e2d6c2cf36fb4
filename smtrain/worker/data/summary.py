"""A summary of a dataset of tokens: counts, the frequency of each token, and how it begins."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from smtrain.core.errors import DataError
from smtrain.core.files import replacing
from smtrain.worker.data.indexed import IndexedDataset, JoinedPairs
from smtrain.worker.data.load.order import Packing
from smtrain.worker.data.manifest import NAME, DatasetManifest, shards_of
from smtrain.worker.data.pack.exchange import prefixes
from smtrain.worker.data.tokenizer import load_tokenizer

_TOP = 12


@dataclass(frozen=True)
class DatasetSummary:
    """A dataset's counts.

    `counts` is int64 [largest id + 1]; `top` the most frequent as (id, text or None, share).
    """

    facts: dict[str, Any]
    counts: NDArray[np.int64]
    top: list[tuple[int, str | None, float]]
    sample: str | None


def inspect(path: Path, tokenizer: Path | None = None) -> DatasetSummary:
    """Read a prepared folder or a Megatron pair through once.

    With a tokenizer folder, tokens are shown as text.

    Raises DataError for anything else.
    """
    parts = [JoinedPairs(pairs) for pairs in prefixes(path, answers=True)]
    counts = np.zeros(0, np.int64)
    for part in parts:
        if part.dtype.kind == "f":
            raise DataError(
                f"{part.pairs[0].bin_path} holds {part.dtype} and not token ids; name a dataset of"
                " tokens."
            )
        for tokens_ in part.chunks():
            chunk_counts = np.bincount(tokens_, minlength=len(counts))
            chunk_counts[: len(counts)] += counts
            counts = chunk_counts
    lengths = np.concatenate([_document_lengths(part) for part in parts])
    tokens = int(counts.sum())
    facts: dict[str, Any] = {
        "documents": len(lengths),
        "sequences": sum(len(part) for part in parts),
        "tokens": tokens,
        "type": parts[0].dtype.name,
        "distinct_tokens": int(np.count_nonzero(counts)),
        "empty_documents": int((lengths == 0).sum()),
    }
    if len(lengths):
        quantiles = np.quantile(lengths, [0, 0.5, 0.9, 1]).astype(int).tolist()
        facts["document_tokens"] = dict(
            zip(("min", "median", "p90", "max"), quantiles, strict=True)
        )
    if path.is_dir() and (path / NAME).is_file():
        manifest = DatasetManifest.load(path)
        fact_names = (
            "seq_len",
            "samples",
            "eos_id",
            "append_eod",
            "tokenized_by",
            "bad_line_count",
            "dropped",
            "parts",
        )
        facts |= {key: getattr(manifest, key) for key in fact_names}
        facts["parts"] = [
            {key: value for key, value in part.items() if key != "shards"}
            for part in manifest.parts
        ]
        facts["not_read"] = manifest.unread
        if manifest.objective != "pretrain" and manifest.noted:
            facts["found"] = manifest.noted
        if manifest.validation:
            facts["held_out_documents"] = manifest.validation["documents"]
            facts["held_out_tokens"] = manifest.validation["tokens"]
        if manifest.objective != "pretrain":
            masks = [path / shard.mask for shard in shards_of(manifest.parts[0])]
            facts |= _packing_facts(masks, parts[0], manifest)
        shards = sum(len(part.pairs) for part in parts)
        facts |= {"shards": shards} if shards > len(parts) else {}
    decoder = load_tokenizer(tokenizer) if tokenizer else None
    top_ids = np.argsort(-counts, kind="stable")[:_TOP]
    top = [
        (
            int(i),
            decoder.decode([int(i)], skip_special_tokens=False) if decoder else None,
            counts[i] / tokens,
        )
        for i in top_ids
        if counts[i]
    ]
    beginning = parts[0].read(0, min(120, parts[0].total)).tolist()
    sample = decoder.decode(beginning, skip_special_tokens=False) if decoder else None
    return DatasetSummary(facts, counts, top, sample)


def ranks(counts: NDArray[np.int64], points: int = 60) -> list[float]:
    """Logarithms of the tokens' frequencies, most frequent first, at `points` places of logarithmic
    rank.
    """
    frequencies = np.sort(counts[counts > 0])[::-1]
    places = np.unique(np.geomspace(1, max(len(frequencies), 1), points).astype(int)) - 1
    return np.log10(frequencies[places]).tolist() if len(frequencies) else []


def save_picture(summary: DatasetSummary, path: Path, title: str) -> None:
    """Plot frequency by rank on logarithmic axes; a PNG at `path` is replaced, any other file is
    not.

    Raises DataError for another file, or without matplotlib.
    """
    if path.exists() and not (path.is_file() and path.read_bytes()[:4] == b"\x89PNG"):
        raise DataError(f"{path} is there already and is no PNG picture; name another file.")
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise DataError(
            "a picture needs matplotlib; run `pip install matplotlib`.", code="package.missing"
        ) from None
    frequencies = np.sort(summary.counts[summary.counts > 0])[::-1]
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axis = figure.subplots()
    axis.loglog(np.arange(1, len(frequencies) + 1), frequencies, color="#1f77b4", linewidth=1.6)
    axis.set(xlabel="rank of the token", ylabel="occurrences", title=title)
    axis.grid(alpha=0.3)
    axis.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as file:
        figure.savefig(file, dpi=150, format="png")


def _packing_facts(
    masks: list[Path], data: JoinedPairs, manifest: DatasetManifest
) -> dict[str, Any]:
    """Rows of an epoch of samples or pairs, how full they are, and the number of tokens that are
    learned.
    """
    sizes, seq_len = (
        data.lengths - 1,
        manifest.seq_len,
    )  # the last token of a sample is predicted only
    if manifest.objective == "dpo":
        sizes = sizes.reshape(-1, 2).sum(-1)
    rows = Packing(0, sizes, seq_len).rows(0)
    learned_tokens = sum(int(IndexedDataset(mask).tokens.sum(dtype=np.int64)) for mask in masks)
    return {
        "rows_an_epoch": rows,
        "rows_filled": round(int(sizes.sum(dtype=np.int64)) / (rows * seq_len), 4),
        "learned_tokens": learned_tokens,
    }


def _document_lengths(data: JoinedPairs) -> NDArray[np.int64]:
    ends = np.concatenate([[0], np.cumsum(data.lengths, dtype=np.int64)])
    lengths: NDArray[np.int64] = np.diff(ends[np.asarray(data.document_index)])
    return lengths
