"""Which weights these are: a digest that is the same for every cut and format of them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from smtrain.core.model.families import LAYER
from smtrain.worker.checkpoint.sources import WeightSource

_COLUMNS = 4096  # of a row that is looked at


def weights_digest(source: WeightSource) -> str:
    """sha256 over names, shapes, types and sampled numbers, under their Hugging Face names.

    Two rows of the first and of the last parameter of each kind are looked at, so that it costs a few dozen reads.
    Raises `CheckpointError` as the source does.
    """

    def sample(name: str) -> bytes:
        shape = source.shape(name)
        rest = [(0, min(n, _COLUMNS)) for n in shape[1:]]
        parts = [b"".join(source.bits(name, [(at, at + 1), *rest]).tobytes() for at in sorted({0, shape[0] // 2}))]
        return b"\0".join([name.encode(), str(shape).encode(), str(source.dtype(name)).encode(), *parts])

    digest = hashlib.sha256()
    with ThreadPoolExecutor(8) as pool:  # a channel that streams from S3 answers late, not slowly
        for part in pool.map(sample, _sampled(source.names())):
            digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()


def _sampled(names: list[str]) -> Iterator[str]:
    """The first and the last layer's parameter of each kind, and those of no layer."""
    kinds: dict[str, list[tuple[int, str]]] = {}
    for name in names:
        found = LAYER.search(name)
        kinds.setdefault(LAYER.sub(".layers.N.", name), []).append((int(found[1]) if found else 0, name))
    for kind in sorted(kinds):
        yield from sorted({min(kinds[kind])[1], max(kinds[kind])[1]})
