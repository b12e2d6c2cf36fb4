"""Stage fetch: a model of the Hugging Face hub -> its files in the model folder, as the other stages read them."""

from __future__ import annotations

import os
import shutil

from token_by_name import read

from smtrain.config import JobConfig
from smtrain.config.checks import HUB
from smtrain.contract.container import Container
from smtrain.errors import SmtrainError
from smtrain.train.entry import main

WANTED = ["*.json", "*.safetensors", "*.model", "merges.txt"]


def stage(config: JobConfig, container: Container) -> None:
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    from huggingface_hub import snapshot_download

    found = HUB.fullmatch(config.model.path)
    assert found, config.model.path
    name, revision = found.groups()
    token = read(config.model.token) if config.model.token else False
    try:
        snapshot_download(
            name, revision=revision, local_dir=container.model_dir, allow_patterns=WANTED, ignore_patterns=["*/*"],
            token=token,
        )  # fmt: skip
    except OSError as error:  # the hub's refusals and the network's
        raise SmtrainError(
            f"{config.model.path} could not be fetched ({type(error).__name__}); check its name and revision, and for "
            "a gated model that its licence was accepted, and model.token"
        ) from None
    shutil.rmtree(container.model_dir / ".cache", ignore_errors=True)
    files = sorted(path.name for path in container.model_dir.iterdir())
    if not any(file.endswith(".safetensors") for file in files):
        raise SmtrainError(f"{config.model.path} has no safetensors; choose a revision or a model that has them")
    print(f"fetched {', '.join(files)}", flush=True)


if __name__ == "__main__":
    main(stage)
