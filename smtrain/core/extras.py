"""What to type where a package is missing: the packages of the extra that it belongs to, by their own names.

smtrain itself may have come from a checkout, a wheel or a git repository, so no command could name it for everyone.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

from smtrain.core.errors import Sentence

MODULES = {
    "local": ("moto", "mfusepy", "werkzeug", "flask"),
    "train": (
        "torch", "transformers", "tokenizers", "safetensors", "pyarrow", "gigatoken", "awkward", "huggingface_hub",
        "jinja2", "tensorboard",
    ),
    "docker": ("docker",),
    "convert": ("numpy", "zlib_ng"),
    "lora": ("peft",),
    "gguf": ("gguf",),
    "mlflow": ("mlflow", "sagemaker_mlflow"),
    "wandb": ("wandb",),
    "tune": ("optuna",),
    "serve": ("fastapi", "uvicorn", "openai"),
    "hub": ("datasets",),
    "wiki": ("mwparserfromhell",),
    "filters": ("datatrove", "spacy", "regex"),
    "near": ("rensa",),
    "pii": ("phonenumbers",),
    "eval": ("lm_eval", "accelerate"),
    "s3": ("s3fs", "fsspec"),
    "notebooks": ("matplotlib", "pandas", "IPython", "ipykernel", "ipywidgets"),
    "aws": ("sagemaker",),
}  # fmt: skip


def present(module: str) -> bool:
    """Whether a module could be imported; it is not."""
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def missing(module: str) -> Sentence:
    """A sentence, without its full stop, for a module that cannot be imported."""
    package = module.partition(".")[0]
    extra = next((name for name, modules in MODULES.items() if package in modules), None)
    of = f" (smtrain's extra {extra})" if extra else ""
    told = f"this needs the package {package}, which is not installed; run `{install(extra, package)}`{of}"
    return Sentence(told, "package.missing")


def install(extra: str | None, package: str = "") -> str:
    """The command that installs the packages of an extra, or `package` where the extra's are not known."""
    return f"pip install {' '.join(_packages(extra)) or package}"


def _packages(extra: str | None) -> list[str]:
    from importlib import metadata  # loads a mail parser

    try:
        declared = metadata.requires("smtrain") or []
    except metadata.PackageNotFoundError:
        return []
    found = []
    for requirement in declared:
        name, _, marker = requirement.partition(";")
        if f"'{extra}'" not in marker.replace('"', "'") or ("sys_platform" in marker and sys.platform not in marker):
            continue
        found.append(f"'{name.strip()}'")
    return found


@contextmanager
def collector_paused() -> Iterator[None]:
    """For imports of large packages, and for the model of an AWS service: they make up to a million objects, none of
    them garbage, and looking for it takes a fifth to a third of the time.

    What is there at the end counts as old, so that the next collection of young objects does not look through it.
    """
    running = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if running:
            # There and back is the one way to the oldest generation that visits no object. What a program has frozen
            # for its children stays frozen.
            if not gc.get_freeze_count():
                gc.freeze()
                gc.unfreeze()
            gc.enable()
