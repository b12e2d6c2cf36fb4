"""A digest of the weights, independent of format and sharding."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from smtrain.core.model.shape import LAYER
from smtrain.worker.checkpoint.sources import WeightSource

# Runs and adapters record this digest: with other samples, names or separators all of them would
# name another base.
_COLUMNS = 4096  # sampled of a row


def weights_digest(source: WeightSource, *, every_layer: bool = False) -> str:
    """sha256 over Hugging Face names, shapes, types and sampled numbers.

    It samples two rows of the first and the last parameter of each kind, which costs a few dozen
    reads, or of every parameter. Raises `CheckpointError` as the source does.
    """

    def sample(name: str) -> bytes:
        shape = source.shape(name)
        inner_bounds = [(0, min(n, _COLUMNS)) for n in shape[1:]]
        # Windows of the whole tensor, by Hugging Face names, so that the cut of the files has no
        # effect.
        parts = [
            b"".join(
                source.bits(name, [(at, at + 1), *inner_bounds]).tobytes()
                for at in sorted({0, shape[0] // 2})
            )
        ]
        return b"\0".join(
            [name.encode(), str(shape).encode(), str(source.dtype(name)).encode(), *parts]
        )

    digest = hashlib.sha256()
    with ThreadPoolExecutor(8) as pool:  # channels that stream from S3 have a high latency
        names = sorted(source.names()) if every_layer else _sample_names(source.names())
        for part in pool.map(sample, names):
            # With lengths, so that bytes moved from one part to the next change the digest.
            digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()


def _sample_names(names: list[str]) -> Iterator[str]:
    """Parameters of the first and the last layer, and those outside of layers."""
    kinds: dict[str, list[tuple[int, str]]] = {}
    for name in names:
        match = LAYER.search(name)
        kinds.setdefault(LAYER.sub(".layers.N.", name), []).append(
            (int(match[1]) if match else 0, name)
        )
    for kind in sorted(kinds):
        yield from sorted({min(kinds[kind])[1], max(kinds[kind])[1]})
