"""Stage fetch: a model of the Hugging Face hub -> its files in the model folder, as the other stages read them."""

from __future__ import annotations

import json
import os
import shutil
from glob import escape

from token_by_name import read

from smtrain.config import JobConfig
from smtrain.config.checks import HUB
from smtrain.contract.container import Container
from smtrain.errors import SmtrainError
from smtrain.model.hf_folder import SOURCE, wanted, weights_in
from smtrain.train.entry import main


def stage(config: JobConfig, container: Container) -> None:
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    from huggingface_hub import HfApi, constants, snapshot_download

    found = HUB.fullmatch(config.model.path)
    assert found, config.model.path
    name, revision = found.groups()
    token = read(config.model.token) if config.model.token else False
    try:
        about = HfApi(token=token).model_info(name, revision=revision or "main")
        files = [item.rfilename for item in about.siblings or []]
        if config.model.init == "weights" and config.model.weights is None and weights_in(files) is None:
            raise SmtrainError(
                f"{config.model.path} has neither model.safetensors nor pytorch_model.bin; choose a revision or a "
                "model that has one"
            )
        snapshot_download(
            name, revision=about.sha, local_dir=container.model_dir, token=token,
            allow_patterns=[escape(file) for file in wanted(files, config.model.weights is None)],
        )  # fmt: skip
    except SmtrainError:
        raise
    except Exception as error:  # the hub's refusals, and the network's as its client has them
        raise SmtrainError(
            f"{config.model.path} could not be fetched ({type(error).__name__}); check its name and revision, and for "
            "a gated model that its licence was accepted, and model.token"
        ) from None
    shutil.rmtree(container.model_dir / ".cache", ignore_errors=True)
    asked = {"endpoint": constants.ENDPOINT, "model": name, "revision": revision or "main", "commit": about.sha}
    (container.model_dir / SOURCE).write_text(json.dumps(asked, indent=2) + "\n")
    files = sorted(path.name for path in container.model_dir.iterdir())
    print(f"fetched {name} at commit {about.sha}: {', '.join(files)}", flush=True)


if __name__ == "__main__":
    main(stage)
