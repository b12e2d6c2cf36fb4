"""Recognise files and folders that are not what their names say, and give the remedy.

Pure Python, from names and first bytes only, so that each command can check before it reads
anything.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import Any

from smtrain.core.files import open_regular_file
from smtrain.core.model.hf_folder import ADAPTER
from smtrain.core.model.text_part import text_part

HEAD = 512
"""Bytes from the beginning of a file that `misfit` reads."""
_LFS = b"version https://git-lfs.github.com/spec/"
_PAGES = (b"<!doctype html", b"<html", b"<head", b"<body")
_ANSWERS = (
    b"entry not found",
    b"repository not found",
    b"invalid username or password",
    b"access to model",
    b"<?xml",
)
_COMPRESSION_MAGIC = {
    b"\x1f\x8b": "gzip",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"7z\xbc\xaf": "7z",
    b"\xfd7zXZ": "xz",
    b"BZh": "bzip2",
}
_ARCHIVES = (".tar.gz", ".tgz", ".tar", ".zip", ".7z", ".tar.bz2", ".tar.xz", ".tar.zst")
_UNPACK = "unpack it, as with `tar -xf`, and name the folder that then has config.json"
CONFIG = "config.json"
_JSON = (".json", ".index.json")
_COPY_AGAIN = "copy this file again from the source of the model"


def archive_fault(name: str) -> str | None:
    """The fault, with the remedy, of a path or URI whose ending is that of an archive; None for any
    other.
    """
    return f"is an archive; {_UNPACK}" if name.lower().rstrip("/").endswith(_ARCHIVES) else None


def misfit(name: str, head: bytes, size: int) -> str | None:
    """The fault of a file whose first bytes do not match its name, with the remedy; None if they
    match.

    `head` has the first `HEAD` bytes of a file of `size` bytes.
    """
    start = head.lstrip().lower()
    if size == 0:
        return f"is empty; {_COPY_AGAIN}"
    # First, as the length of its header may begin like a pickle or a packed file.
    if name.endswith(".safetensors") and _is_safetensors(head):
        return None
    if head.startswith(_LFS):
        pointer = re.search(rb"size (\d+)", head)
        of = f" of a file of {int(pointer[1]):,} bytes" if pointer else ""
        return (
            f"is a Git LFS pointer{of}, not the file; run `git lfs pull` in its folder, or copy"
            " this file"
        )
    if start.startswith(_PAGES):
        return (
            "is a web page (HTML), not the file: the download was answered with a page;"
            f" {_COPY_AGAIN}"
        )
    if start.startswith(_ANSWERS) or (
        name.endswith((".safetensors", ".bin")) and start.startswith(b'{"error"')
    ):
        excerpt = " ".join(head[:60].decode("utf-8", "replace").split())
        return (
            f"is a server's answer ({excerpt}), not the file: the download was refused;"
            f" {_COPY_AGAIN}"
        )
    if not head.strip(b"\0"):
        return (
            f"has only zero bytes at its beginning: its download or copy did not end; {_COPY_AGAIN}"
        )
    if archive := archive_fault(name):
        return archive
    for magic, kind in _COMPRESSION_MAGIC.items():
        if head.startswith(magic):
            plain = re.sub(r"\.(gz|zst|7z|xz|bz2)$", "", PurePosixPath(name).name)
            return f"is packed with {kind}; unpack it under the name {plain}"
    if name.endswith(_JSON):
        return _misfit_json(head)
    return _misfit_weights(name, head)


def _is_safetensors(head: bytes) -> bool:
    """Whether a file begins with the length of a header, below 4 GiB, and the header."""
    return len(head) > 9 and head[8:9] == b"{" and not any(head[4:8])


def _misfit_json(head: bytes) -> str | None:
    if head.startswith(b"\xef\xbb\xbf"):
        return "begins with a byte-order mark; save it as UTF-8 without one"
    if head.startswith((b"\xff\xfe", b"\xfe\xff")):
        return "is UTF-16; save it as UTF-8"
    return None


def _misfit_weights(name: str, head: bytes) -> str | None:
    stem = PurePosixPath(name).stem
    if head.startswith(b"GGUF"):
        return f"is a GGUF file of llama.cpp; {_GGUF}"
    if head.startswith(b"\x89HDF"):
        return f"is an HDF5 file of Keras; {_OTHER_FRAMEWORK}"
    is_pickle = head.startswith((b"PK\3\4", b"\x80\2", b"\x80\3", b"\x80\4", b"\x80\5"))
    if name.endswith(".safetensors") and is_pickle:
        return (
            "is a file of torch.save, not of safetensors; rename it to"
            f" {stem.replace('model', 'pytorch_model')}.bin"
        )
    if name.endswith(".bin") and _is_safetensors(head):
        safetensors_name = f"{stem.replace('pytorch_model', 'model')}.safetensors"
        return f"is a safetensors file, not one of torch.save; rename it to {safetensors_name}"
    return None


def file_misfit(path: Path) -> str | None:
    """`misfit` of a local file, as a sentence with its path; None also if the file does not
    exist.
    """
    if path.exists() and not path.is_file():
        return f"{path} is no regular file; {_COPY_AGAIN}"
    try:
        size = path.stat().st_size
        with open_regular_file(path) as file:
            fault = misfit(path.name, file.read(HEAD), size)
    except OSError:
        return None
    return None if fault is None else f"{path} {fault}"


def broken_link(folder: Path) -> str | None:
    """A fault if a file of the folder is a broken link, as in a copy of a hub's cache without its
    blobs.
    """
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if path.is_symlink() and not path.exists():
            return (
                f"{path} is a link to {path.readlink()}, which is not there; copy the file itself"
                " (`cp -L`, or rsync with -L) from the source of the model"
            )
    return None


def file_kind(path: Path) -> str:
    """Describe a file that was named instead of a folder."""
    with path.open("rb") as file:
        head = file.read(HEAD)
    if head.startswith(b"GGUF"):
        return f"a GGUF file of llama.cpp, which is not read; {_GGUF}"
    fault = misfit(path.name, head, path.stat().st_size)
    return f"it {fault}" if fault else "not one that a model's folder has"


_GGUF = (
    "take the Hugging Face model that it was made from, or make one with transformers: "
    "AutoModelForCausalLM.from_pretrained(FOLDER, gguf_file=FILE).save_pretrained(NEW)"
)
_OTHER_FRAMEWORK = "save the model from PyTorch with save_pretrained, as model.safetensors"
_FORMS: tuple[tuple[tuple[str, ...], str, str], ...] = (
    (
        ("*.incomplete", "*.aria2", "*.part", "*.crdownload", ".cache/*.incomplete"),
        "a download that has not ended",
        "run the same download again, which continues",
    ),
    (
        ("adapter_model.safetensors", "adapter_model.bin"),
        "the weights of an adapter without its adapter_config.json",
        f"copy {ADAPTER} next to them",
    ),
    (
        ("model_index.json", "unet/*", "transformer/*", "vae/*"),
        "a pipeline of diffusers, which makes pictures",
        "smtrain trains language models: give the folder of one",
    ),
    (
        (
            "*/zero_pp_rank_*",
            "zero_pp_rank_*",
            "*/mp_rank_*_model_states.pt",
            "mp_rank_*_model_states.pt",
        ),
        "a sharded checkpoint of DeepSpeed ZeRO",
        (
            "make one file of it with the script that lies next to it, `python zero_to_fp32.py ."
            " pytorch_model.bin`"
        ),
    ),
    (
        (
            "pytorch_model_fsdp_*/*.distcp",
            "*.distcp",
            "*/*.distcp",
        ),
        "shards of torch.distributed.checkpoint without their .metadata, which is written last",
        "copy .metadata there too, or take a checkpoint whose save has ended",
    ),
    (("*.gguf",), "a GGUF file of llama.cpp", _GGUF),
    (
        ("consolidated*.pth", "original/consolidated*.pth"),
        "Meta's original form",
        (
            "take the Hugging Face form of the model, or convert it with transformers'"
            " convert_llama_weights_to_hf.py"
        ),
    ),
    (
        ("consolidated*.safetensors",),
        "Mistral's own form",
        (
            "take the Hugging Face form of the model (model.safetensors), which the same repository"
            " has, or convert it with transformers' convert_mistral_weights_to_hf.py"
        ),
    ),
    (("*.onnx", "*/*.onnx"), "an ONNX export", "take the model that it was exported from"),
    (
        ("tf_model.h5", "*.h5", "flax_model*.msgpack"),
        "weights of TensorFlow or Flax",
        _OTHER_FRAMEWORK,
    ),
    (
        ("*.nemo",),
        "an archive of NeMo",
        "unpack it with tar and name the folder inside, or export it to Hugging Face",
    ),
    (
        ("weights.npz", "*.mlx", "*.mlpackage/*", "openvino_model.bin", "openvino_model.xml"),
        "weights for another runtime",
        "take the Hugging Face model that they were made from",
    ),
    (
        ("optimizer.pt", "optimizer.bin", "scheduler.pt", "rng_state*.pth", "training_args.bin"),
        "the state of a trainer without the model",
        (
            "copy model.safetensors and config.json of the same step next to it, or name the folder"
            " that has them"
        ),
    ),
    (
        ("*.ckpt", "*.pt", "*.pth"),
        "files of torch.save under other names",
        "rename the one that holds the weights to pytorch_model.bin",
    ),
    (
        ("*.safetensors",),
        "safetensors files under other names",
        "rename the one that holds the weights to model.safetensors",
    ),
    (
        ("*.bin",),
        "files of torch.save under other names",
        "rename the one that holds the weights to pytorch_model.bin",
    ),
)
"""Patterns of names, the kind of folder, and the remedy; the first match counts."""
_WEIGHTS = re.compile(r"(model|pytorch_model)(-\d+-of-\d+)?\.(safetensors|bin)")
"""Names of weights in a Hugging Face folder."""


def folder_misfit(names: Iterable[str], label: object) -> str | None:
    """The fault of a folder without readable weights: its content, and the remedy; None
    if unknown.

    `names` are relative to the folder, `label` is the user's name for it.
    """
    present_names = list(names)
    if not present_names and (archive := archive_fault(str(label))):  # named as a folder or prefix
        return f"{label} {archive}"
    if ADAPTER in present_names:
        return (
            f"{label} holds an adapter, not a model; merge it into its base with "
            f"`smtrain convert BASE TARGET --to hf --merge-adapter {label}`"
        )
    weights = re.compile(r"([^/]+)/(?:model|pytorch_model)[^/]*\.(?:safetensors|bin)")
    subfolders = sorted(
        match[1]
        for name in present_names
        if (match := weights.fullmatch(name)) and f"{match[1]}/{CONFIG}" in present_names
    )
    if subfolders:
        return f"{label} is not the model's folder itself; name {label}/{subfolders[-1]}"
    named_well = [name for name in present_names if _WEIGHTS.fullmatch(name)]
    for patterns, description, remedy in _FORMS:
        other_names = (name for name in present_names if name not in named_well)
        fits = [
            name for name in other_names if any(fnmatchcase(name, pattern) for pattern in patterns)
        ]
        if fits:
            return f"{label} holds {description} ({fits[0]}); {remedy}"
    if named_well and CONFIG not in present_names:
        return (
            f"{label} holds {named_well[0]} without its {CONFIG}; copy {CONFIG} of the same model"
            " next to it"
        )
    archive = next(
        (
            name
            for name in sorted(present_names)
            if CONFIG not in present_names and archive_fault(name)
        ),
        None,
    )
    return f"{label} holds an archive ({archive}) and no {CONFIG}; {_UNPACK}" if archive else None


def missing_shards(names: Iterable[str]) -> tuple[list[str], list[str]]:
    """(existing files, missing files) of a model in numbered shards without an index."""
    by_pattern: dict[tuple[str, str, str], set[int]] = {}
    for name in names:
        match = re.fullmatch(r"(model|pytorch_model)-(\d+)-of-(\d+)\.(safetensors|bin)", name)
        if match:
            by_pattern.setdefault((match[1], match[3], match[4]), set()).add(int(match[2]))
    if not by_pattern:
        return [], []
    (stem, total, ending), numbers = min(by_pattern.items(), key=lambda item: item[0])
    shards_by_number = {
        n: f"{stem}-{n:05d}-of-{total}.{ending}" for n in range(1, min(int(total), 10_000) + 1)
    }
    return [shards_by_number[n] for n in shards_by_number if n in numbers], [
        shards_by_number[n] for n in shards_by_number if n not in numbers
    ]


_TOOLS = {
    "awq": "AWQ",
    "gptq": "GPTQ",
    "bitsandbytes": "bitsandbytes",
    "compressed-tensors": "compressed-tensors",
    "fp8": "fp8",
    "fbgemm_fp8": "fbgemm fp8",
    "mxfp4": "mxfp4",
    "torchao": "torchao",
    "quanto": "quanto",
    "aqlm": "AQLM",
    "hqq": "HQQ",
    "eetq": "EETQ",
    "bitnet": "BitNet",
    "modelopt": "ModelOpt",
}
DEQUANTIZE = (
    "give the bf16 or fp32 model that it was made from, or write one: transformers' "
    "AutoModelForCausalLM.from_pretrained(FOLDER), model.dequantize() and save_pretrained(NEW)"
)


def dequantize(method: str) -> str:
    """The remedy for weights that are quantized by a method, as `quantization` names it."""
    if "fp8" not in method:
        return DEQUANTIZE
    return (
        "give the bf16 model that it was made from, or write one: transformers'"
        " AutoModelForCausalLM.from_pretrained(FOLDER,"
        " quantization_config=FineGrainedFP8Config(dequantize=True)) and save_pretrained(NEW)"
    )


def unreadable_quantization(config: Mapping[str, Any]) -> str | None:
    """`quantization`, but for mxfp4 of gpt-oss, bitsandbytes' 4 bits and fp8 in blocks, which are
    read as the numbers that they stand for.
    """
    method, settings = quantization(config), config.get("quantization_config")
    is_mxfp4 = method == "mxfp4" and text_part(config).get("model_type") == "gpt_oss"
    is_4bit = (
        method == "bitsandbytes" and isinstance(settings, Mapping) and settings.get("load_in_4bit")
    )
    return None if is_mxfp4 or is_4bit or fp8_block(config) is not None else method


def fp8_block(config: Mapping[str, Any]) -> tuple[int, int] | None:
    """The rows and columns that share a factor of weights in fp8 (E4M3), if config.json names such
    weights of a text model; None for other ones.
    """
    settings = config.get("quantization_config")
    if (
        quantization(config) != "fp8"
        or not isinstance(settings, Mapping)
        or "text_config" in config
    ):
        return None
    block = settings.get("weight_block_size")
    if settings.get("fmt", "e4m3") not in ("e4m3", "float8_e4m3fn") or not isinstance(block, list):
        return None
    is_pair = len(block) == 2 and all(type(n) is int and n > 0 for n in block)
    return (block[0], block[1]) if is_pair else None


def quantization(config: Mapping[str, Any]) -> str | None:
    """The quantization method in a config.json; None without one."""
    text_config = text_part(config)
    keys = ("quantization_config", "compression_config")
    settings = next(
        filter(None, (part.get(key) for part in (config, text_config) for key in keys)), None
    )
    if not settings:
        return None
    method_settings = settings if isinstance(settings, Mapping) else {}
    loads = any(
        str(key).startswith("load_in_") for key in method_settings
    )  # older files of bitsandbytes
    method = method_settings.get("quant_method") or ("bitsandbytes" if loads else "")
    return _TOOLS.get(str(method), str(method)[:40] or "a method that it does not name")
