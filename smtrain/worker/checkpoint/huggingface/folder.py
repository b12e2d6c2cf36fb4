"""Hugging Face folders: config.json and weights, one file or shards with an index, read lazily.

Weights are read from safetensors, or else from torch's `pytorch_model.bin`.
"""

from __future__ import annotations

import logging
import os
import re
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from smtrain.core.errors import CheckpointError
from smtrain.core.model.families import FAMILIES
from smtrain.core.model.hf_folder import folder_of, weights_in
from smtrain.core.model.remedies import (
    broken_link,
    folder_misfit,
    fp8_block,
    missing_shards,
    quantization,
)
from smtrain.core.model.shape import ModelShape
from smtrain.core.model.text_part import is_multimodal, text_name, text_part
from smtrain.worker.checkpoint import stored_names
from smtrain.worker.checkpoint.conversion_manifest import checksums, read_manifest
from smtrain.worker.checkpoint.dtypes import FLOATS, Bits, DType
from smtrain.worker.checkpoint.huggingface import safetensors
from smtrain.worker.checkpoint.huggingface.bnb_tensors import Bnb4bit, join_bnb_tensors
from smtrain.worker.checkpoint.huggingface.expert_tensors import (
    Mxfp4,
    join_mxfp4_pairs,
    split_experts,
)
from smtrain.worker.checkpoint.huggingface.fp8_tensors import Fp8Blocks, join_fp8_tensors
from smtrain.worker.checkpoint.sources import ReadCallback, WeightSource
from smtrain.worker.checkpoint.storage import Bounds, Place, place, read_json
from smtrain.worker.checkpoint.tensor_ranges import Slab, Tally
from smtrain.worker.checkpoint.torch_files import zip as torchzip

log = logging.getLogger(__name__)
CONFIG = "config.json"
SINGLE = "model.safetensors"
_FORMAT_NAMES: dict[type[Slab], str] = {
    Mxfp4: "mxfp4",
    Bnb4bit: "bitsandbytes' 4 bits",
    Fp8Blocks: "fp8",
}
"""The formats that are read as the numbers that they stand for."""
_SAMPLE_ROWS = 64
"""Rows of a tied output layer to compare when a model is opened; all are compared when it is read.
"""

# Buffers that older transformers saved and newer ones compute. A tied head is its embedding.
COMPUTED_BUFFERS = re.compile(
    r"rotary_emb\.inv_freq$|\.attn\.(masked_)?bias$|\.attention\.(masked_)?bias$"
)


def is_hf_folder(location: Place) -> bool:
    return weights_in(location.files()) is not None


def read_config(location: Place | Path | str) -> dict[str, Any]:
    """Read a folder's config.json, which may be named itself; of a multimodal model it has all
    parts.

    Raises CheckpointError if it is missing.
    """
    location = place(folder_of(str(location)) if isinstance(location, (str, Path)) else location)
    root = location.path()
    if root is not None and not root.is_dir():
        reason = "is a file" if root.exists() else "does not exist"
        raise CheckpointError(
            f"{root} {reason}; name the model's folder, or the config.json in it.",
            code="checkpoint.missing",
        )
    if CONFIG not in location.files():
        if root is not None and (link_fault := broken_link(root)):
            raise CheckpointError(f"{link_fault}.")
        raise CheckpointError(
            f"{location} has no config.json; copy the model's into it, or name its folder with"
            " --config (config=).",
            code="checkpoint.missing",
        )
    return read_json(location, CONFIG)


class HFSource(WeightSource):
    """A Hugging Face folder as a `WeightSource`.

    It also reads names with words that torch.compile, DDP and FSDP add, a state dict under a key of
    a .bin, and numbered shards without an index. Raises CheckpointError if a file is missing, cut
    short or not what its name says, if the index points out of the folder, if weights are
    quantized, and if a parameter is missing, unknown or of another shape than config.json says. Of
    a multimodal model it is the text part. gpt-oss's mxfp4, bitsandbytes' 4 bits and fp8 in blocks
    are read as the numbers that they stand for.
    """

    def __init__(self, folder: Place | Path | str, config: dict[str, Any] | None = None) -> None:
        self._place = place(folder)
        self.whole = (
            config
            if config is not None and CONFIG not in self._place.files()
            else read_config(self._place)
        )
        """The config.json of the whole model."""
        self._shape = ModelShape.from_config(self.whole)
        self._config = text_part(self.whole) if is_multimodal(self.whole) else self.whole
        self._manifest = read_manifest(self._place)
        self._read: ReadCallback | None = None
        stored_slabs = join_bnb_tensors(self._stored_slabs())
        if (block := fp8_block(self.whole)) is not None:
            stored_slabs = join_fp8_tensors(stored_slabs, block)
        self.others: dict[str, Slab] = {}
        """The tensors of the other parts of a multimodal model, by their names in the files."""
        inner_names = {name: name for name in stored_slabs}
        if is_multimodal(self.whole):
            prefix = self._shape.rules.prefix
            inner_names = {
                name: inner_name
                for name in stored_slabs
                if (inner_name := text_name(stored_names.without_wrappers(name), prefix))
                is not None
            }
            # Names that text_name does not know are of other parts, such as vision, which
            # MultimodalSource copies unchanged.
            self.others = {
                name: slab for name, slab in stored_slabs.items() if name not in inner_names
            }
        stored_slabs = {inner_name: stored_slabs[name] for name, inner_name in inner_names.items()}
        plain = stored_names.plain_names(stored_slabs, self._shape, self._place)
        slabs = {plain[name]: slab for name, slab in stored_slabs.items()}
        experts = self._shape.rules.experts
        self.stacks = {
            name: stored_slabs[inner_name].shape
            for name, inner_name in inner_names.items()
            if len(self._shape.file_parts(inner_name, stored_slabs[inner_name].shape)) > 1
        }
        """The tensors of all experts that the text model has one by one: name in the files -> shape.
        """
        if experts is not None:
            slabs = split_experts(join_mxfp4_pairs(slabs), self._shape)
        self.widened = {
            name: _FORMAT_NAMES[type(slab)]
            for name, slab in sorted(slabs.items())
            if type(slab) in _FORMAT_NAMES
        }
        """The parameters that are stored in 4 or 8 bits, and read as the numbers that they stand
        for, with their formats.
        """
        # The weights are plain from here: with this key, a loader would look for quantized ones.
        if self.widened:
            self._config = {
                key: value for key, value in self._config.items() if key != "quantization_config"
            }
        self.stored = {name: plain[inner_name] for name, inner_name in inner_names.items()}
        """Name in the files -> the text model's own name."""
        self.renamed = (
            any(name != inner_name for name, inner_name in plain.items()) or self._unusual
        )
        # mxfp4 changes names by design (two tensors become one), and loaders know the pairs.
        # Linears in 4 bits of bitsandbytes or in fp8 would be loaded like that again.
        self.renamed = self.renamed or (
            any(isinstance(slab, (Bnb4bit, Fp8Blocks)) for slab in slabs.values())
            or (
                not (self.widened or (experts is not None and experts.has_stacked_files))
                and slabs.keys() != {*plain.values()}
            )
        )
        """Whether loaders that go by the names in the files would miss weights."""
        # Only after join_mxfp4_pairs: _blocks and _scales count as names of quantized weights.
        self._refuse_quantized(slabs)
        self._slabs: dict[str, Slab] = {}
        head = self._head_name = f"{FAMILIES[self._shape.family].head}.weight"
        if self._shape.tied and head in slabs and not self._name_of(self._shape.embed_name, slabs):
            slabs[self._shape.embed_name] = slabs.pop(
                head
            )  # tied weights may be saved under either name
            self.renamed = True
        # The loop takes tensors out of `slabs`, and the errors need all names.
        all_slabs = dict(slabs)
        for spec in self._shape.specs:
            name = self._name_of(spec.name, slabs)
            if name is None:
                raise stored_names.missing_parameter_error(
                    spec.name, all_slabs, self._shape, self._place
                )
            slab = self._slabs[spec.name] = slabs.pop(name)
            if slab.shape != spec.shape:
                raise stored_names.wrong_shape(
                    spec.name, slab, spec.shape, self._shape, self._place
                )
            if slab.dtype not in FLOATS:
                raise CheckpointError(
                    f"{self._place}: {spec.name} has the type {slab.dtype.code}; save the model in"
                    " bf16 or fp32."
                )
        ignored_names = {name for name in slabs if self._shape.left_out_part(name) is not None}
        # The rest is refused: a weight that no parameter takes means that config.json is of
        # another model, and loading would silently drop it.
        for name in (name for name in slabs if name not in ignored_names):
            if (
                not (self._shape.tied and name == head)
                and not COMPUTED_BUFFERS.search(name)
                and 0 not in slabs[name].shape  # shared experts of no rows, as transformers saves
            ):
                raise stored_names.unknown_tensor_error(name, all_slabs, self._shape, self._place)
        # Every rank opens the folder, and one warning is enough.
        if ignored_names and os.environ.get("RANK", "0") == "0":
            log.warning("%s: %s", self._place, stored_names.left_out(ignored_names, self._shape))
        self._head = slabs.get(head) if self._shape.tied else None
        if self._head is not None:
            self._refuse_untied(self._head)

    def _name_of(self, name: str, slabs: dict[str, Slab]) -> str | None:
        return next((n for n in (name, *self._shape.file_aliases(name)) if n in slabs), None)

    def _refuse_quantized(self, slabs: dict[str, Slab]) -> None:
        """Raises CheckpointError for quantized weights, and for a config.json that wrongly calls
        them quantized.
        """
        method = quantization(self.whole)
        config_clause = f"config.json names {method}, and " if method else ""
        odd = next(
            (name for name, slab in slabs.items() if slab.dtype.name.startswith("float8")), None
        )
        if odd is not None:
            raise stored_names.quantized_weights_error(
                self._place, f"{config_clause}{odd} is {slabs[odd].dtype}"
            )
        if (scale := stored_names.quantized_in(slabs)) is not None:
            raise stored_names.quantized_weights_error(
                self._place, f"{config_clause}it has {scale}"
            )
        # self.whole keeps quantization_config of weights that are widened.
        if method is None or self.widened:
            return
        kinds = {str(slab.dtype) for slab in slabs.values() if slab.dtype in FLOATS}
        has_packed = any(
            slab.dtype not in FLOATS and not COMPUTED_BUFFERS.search(name)
            for name, slab in slabs.items()
        )
        # A missing head is no sign of packed weights: config.json may only lack the tie.
        names = [
            self._name_of(spec.name, slabs)
            for spec in self._shape.specs
            if spec.name != self._shape.head_name
        ]
        if has_packed or None in names:
            raise stored_names.quantized_weights_error(self._place, f"config.json names {method}")
        raise CheckpointError(
            f"{self._place}/config.json says that the weights are quantized ({method}), and they"
            f" are plain {' and '.join(sorted(kinds))}; take quantization_config out of"
            " config.json."
        )

    def _refuse_untied(self, head: Slab) -> None:
        """Raises CheckpointError if sampled rows of the output layer differ from the embedding that
        it is tied to.
        """
        embed = self._slabs[self._shape.embed_name]
        rows, columns = embed.shape
        sampled_rows = sorted({*range(0, rows, max(1, rows // _SAMPLE_ROWS)), rows - 1})
        windows = [[(row, row + 1), (0, columns)] for row in sampled_rows]
        has_same_layout = head.shape == embed.shape and head.dtype == embed.dtype
        if not has_same_layout or not all(
            np.array_equal(head.bits(window), embed.bits(window)) for window in windows
        ):
            raise stored_names.untied_head_error(
                self._place, self._head_name, self._shape.embed_name
            )

    @property
    def config(self) -> dict[str, Any]:
        return self._config

    @property
    def text_shape(self) -> ModelShape:
        return self._shape

    def names(self) -> list[str]:
        return sorted(self._slabs)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._slab(name).shape

    def dtype(self, name: str) -> DType:
        return self._slab(name).dtype

    def bits(self, name: str, bounds: Bounds, tally: Tally | None = None) -> Bits:
        slab = self._slab(name)
        if self._read is not None:
            self._read(f"{slab.file} {name}", partial(slab.check_or_hash, name))
        bits = slab.bits(bounds, tally)
        head = self._head if name == self._shape.embed_name else None
        if head is not None and not np.array_equal(bits, head.bits(bounds)):
            raise stored_names.untied_head_error(self._place, self._head_name, name)
        return bits

    def check(self, name: str, tally: Tally | None = None) -> None:
        self._slab(name).check(name, tally)

    @property
    def read_alike(self) -> bool:
        return True

    def watch(self, read: ReadCallback) -> None:
        self._read = read

    @property
    def location(self) -> Place:
        return self._place

    def _stored_slabs(self) -> dict[str, Slab]:
        """Stored name -> slab, of all tensors in the folder."""
        files = self._place.files()
        self._unusual = False
        first = weights_in(files)
        if first is None:
            present_shards, absent = missing_shards(files)
            if present_shards and not absent:  # complete without an index
                self._unusual = True
                return self._all_of(
                    {name: file for file in present_shards for name in self._file(file)}, ""
                )
            raise no_weights(self._place)
        # weights_in prefers one file to an index, as from_pretrained does.
        if not first.endswith(".index.json"):
            return self._file(first)
        path = f"{self._place}/{first}"
        index = read_json(self._place, first, "; or delete it: numbered shards are read without it")
        weight_map = index.get("weight_map")
        if not isinstance(weight_map, dict):
            raise CheckpointError(
                f"{path} is not an index of weights (it has no weight_map); copy this file again,"
                " or delete it: numbered shards are read without it.",
                code="checkpoint.damaged",
            )
        for name, file in weight_map.items():
            if (
                # An index comes from a download: a path in it could name any file of this machine.
                not isinstance(file, str)
                or Path(file).name != file
                or "\0" in file
                or file in ("", "..", ".")
            ):
                raise CheckpointError(
                    f"{path} points {name} to {file!r}, which is not a file in its folder; put the"
                    " file there and its name into the index."
                )
        absent = sorted({*weight_map.values()} - {*files})
        if absent:
            raise missing_shards_error(self._place, absent, len({*weight_map.values()}), first)
        return self._all_of(weight_map, first)

    def _all_of(self, weight_map: dict[str, str], index: str) -> dict[str, Slab]:
        out = {}
        for file in sorted(set(weight_map.values())):
            tensors = self._file(file)
            for name in (name for name, at in weight_map.items() if at == file):
                if name not in tensors:
                    raise CheckpointError(
                        f"{self._place}/{file} lacks {name}, which {index} says it has: one of the"
                        " two files is of another model; copy both again, or delete the index,"
                        " which numbered shards do without.",
                        code="checkpoint.other_model",
                    )
                out[name] = tensors[name]
        return out

    def _file(self, file: str) -> dict[str, Slab]:
        if not file.endswith(".safetensors"):
            content = torchzip.load(self._place, file)
            tensors = stored_names.tensors_in(content)
            if tensors is None:
                raise stored_names.not_tensors(content, f"{self._place}/{file}")
            # Other loaders take only tensors at the top of a .bin, not under a key.
            self._unusual = self._unusual or not all(
                isinstance(value, Slab) for value in content.values()
            )
            return tensors
        # safetensors has no checksums; the manifest of our own conversions has the only ones.
        crcs = checksums(self._manifest, file)
        return {
            name: slab.with_crc32(crcs.get(name))
            for name, slab in safetensors.slabs(self._place, file).items()
        }

    def _slab(self, name: str) -> Slab:
        if name not in self._slabs:
            raise CheckpointError(f"{self._place} has no parameter {name}.")
        return self._slabs[name]


def no_weights(location: Place) -> CheckpointError:
    """The error for a folder without weights that we read: its content, and the remedy."""
    present_shards, absent = missing_shards(location.files())
    if present_shards:
        return missing_shards_error(location, absent, len(present_shards) + len(absent), None)
    if fault := folder_misfit(location.files(), location):
        return CheckpointError(f"{fault}.")
    return CheckpointError(
        f"{location} lacks {SINGLE}, pytorch_model.bin and an index of them; save the"
        " model as safetensors.",
        code="checkpoint.missing",
    )


def missing_shards_error(
    location: Place, absent: list[str], of: int, index: str | None
) -> CheckpointError:
    """The error for missing files of weights."""
    listing = ", ".join(absent[:3]) + (f" and {len(absent) - 3} more" if len(absent) > 3 else "")
    index_clause = f", which {index} names" if index else ""
    return CheckpointError(
        f"{location} lacks {len(absent)} of its {of} files of weights ({listing}){index_clause};"
        " copy those files into it.",
        code="checkpoint.damaged",
    )


def refuse_renamed(folder: Path | str) -> None:
    """Raises CheckpointError for a folder whose weights other libraries would not find by their
    names.
    """
    config = read_config(folder)
    if (
        # HFSource raises for other families and for quantized weights, and other libraries
        # may load both.
        text_part(config).get("model_type") in FAMILIES
        and quantization(config) is None
        and HFSource(folder).renamed
    ):
        raise CheckpointError(
            f"{folder} has weights under names that smtrain understands and transformers and vLLM"
            f" do not; write them under their own with `smtrain convert {folder} NEW --to hf` and"
            " name NEW."
        )
