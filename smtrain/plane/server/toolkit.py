"""The command of a job's hosts: the request's entrypoint, or `train` of the sagemaker-training
toolkit.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

from smtrain.plane.server.channels import InputError

SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
# AWS's PyTorch images, also Neuron's, set this. Without it the toolkit starts a script once,
# without a rank.
MODULE = "SAGEMAKER_TRAINING_MODULE"
PYTORCH, PYTORCH_MAIN = "sagemaker_pytorch_container", "sagemaker_pytorch_container.training:main"
# Hyperparameters with which SDK v2's `distribution` asks for ranks.
_DISTRIBUTION_OPTION = re.compile(r"sagemaker_(?!toolkit_native_launcher).+_enabled$")


class Command(NamedTuple):
    """The command of every host, and the variables that its image would set."""

    argv: list[str]
    environment: dict[str, str]


def search_path(request: dict[str, Any]) -> str:
    """PATH of a job: the request's, else the control plane's Python and the system."""
    return str(
        (request.get("Environment") or {}).get("PATH")
        or f"{Path(sys.executable).parent}:{SYSTEM_PATH}"
    )


def command(request: dict[str, Any]) -> Command:
    """The command of a request.

    Raises `InputError` if it is not on the job's PATH, or cannot distribute.
    """
    algorithm = request["AlgorithmSpecification"]
    arguments = algorithm.get("ContainerArguments") or []
    if entrypoint := algorithm.get("ContainerEntrypoint"):
        return Command([*entrypoint, *arguments], {})
    path = search_path(request)
    train = shutil.which("train", path=path)
    if train is None:
        raise InputError(
            "the request has no AlgorithmSpecification.ContainerEntrypoint, and the image it names"
            " cannot be run locally: give an entrypoint, or install sagemaker-training and, for"
            " PyTorch, sagemaker-pytorch-training, whose `train` would be it, on the job's PATH"
            f" ({path})"
        )
    variables = {}
    if MODULE not in (request.get("Environment") or {}):
        if _imports(train, PYTORCH):
            variables = {MODULE: PYTORCH_MAIN}
        elif switch := _distribution(request):
            raise InputError(
                f"the request asks for {switch}, and {train} would run the script once on each"
                " host, without a rank: install sagemaker-pytorch-training next to it"
            )
    return Command([train, *arguments], variables)


def _distribution(request: dict[str, Any]) -> str | None:
    """The hyperparameter that asks for distributed training."""
    values = (request.get("HyperParameters") or {}).items()
    return next(
        (
            name
            for name, value in values
            if _DISTRIBUTION_OPTION.match(name) and value.strip('"') == "true"
        ),
        None,
    )


def _imports(script: str, module: str) -> bool:
    """Whether the Python of an installed script has a module."""
    with open(script, "rb") as text:
        first = text.readline()
    interpreter = first[2:].decode(errors="replace").split() if first.startswith(b"#!") else []
    if not interpreter:
        return False
    program = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
    try:
        return subprocess.run([*interpreter, "-c", program], capture_output=True).returncode == 0
    except OSError:
        return False
