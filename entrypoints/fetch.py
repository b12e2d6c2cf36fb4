"""Stage fetch: a model of a hub -> its files in the model folder, in the form that the other stages
read.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Collection
from glob import escape
from pathlib import Path

from token_by_name import read

from smtrain.core.config import JobConfig
from smtrain.core.errors import SmtrainError, first_line
from smtrain.core.model import modelscope
from smtrain.core.model.hf_folder import SOURCE, needed_files, weights_in
from smtrain.core.model.remedies import folder_misfit, missing_shards
from smtrain.core.protocol.container import Container
from smtrain.core.protocol.uris import HUB
from smtrain.worker.data.read.hub import AWAY, SILENT_S, is_away
from smtrain.worker.entry import main


def stage(config: JobConfig, container: Container) -> None:
    uri = HUB.fullmatch(config.model.path)
    assert uri, config.model.path
    hub, name, revision = uri.groups()
    token = read(config.model.token) if config.model.token else None
    fetch = from_modelscope if hub == "modelscope" else from_hugging_face
    request = {
        "model": name,
        "revision": revision or (modelscope.BRANCH if hub == "modelscope" else "main"),
    }
    try:
        source = fetch(config, name, request["revision"], container.model_dir, token)
    except SmtrainError:
        raise
    except Exception as error:  # each hub's client has its own errors for refusals and the network
        if is_away(error):
            raise SmtrainError(f"{config.model.path}: {AWAY} ({first_line(error)})") from None
        raise SmtrainError(
            f"{config.model.path} could not be fetched ({type(error).__name__}); check its name and"
            " revision, and for a gated model that its licence was accepted, and model.token"
        ) from None
    record = {"endpoint": source["endpoint"], **request, "commit": source["commit"]}
    record |= {"hub": hub} if hub == "modelscope" else {}
    (container.model_dir / SOURCE).write_text(json.dumps(record, indent=2) + "\n")
    files = sorted(path.name for path in container.model_dir.iterdir())
    print(f"fetched {name} at commit {source['commit']}: {', '.join(files)}", flush=True)


def from_hugging_face(
    config: JobConfig, name: str, revision: str, folder: Path, token: str | None
) -> dict[str, str | None]:
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    from huggingface_hub import HfApi, constants, snapshot_download

    model_info = HfApi(token=token or False).model_info(name, revision=revision, timeout=SILENT_S)
    files = _wanted_files(config, [item.rfilename for item in model_info.siblings or []])
    snapshot_download(
        name,
        revision=model_info.sha,
        local_dir=folder,
        token=token or False,
        allow_patterns=[escape(file) for file in files],
    )
    shutil.rmtree(folder / ".cache", ignore_errors=True)
    return {"endpoint": constants.ENDPOINT, "commit": model_info.sha}


def from_modelscope(
    config: JobConfig, name: str, revision: str, folder: Path, token: str | None
) -> dict[str, str | None]:
    commit, files = modelscope.list_files(name, revision, token)
    chosen_paths = set(_wanted_files(config, [file.path for file in files]))
    modelscope.fetch(name, [file for file in files if file.path in chosen_paths], folder, token)
    return {"endpoint": modelscope.site(), "commit": commit}


def _wanted_files(config: JobConfig, files: Collection[str]) -> list[str]:
    needs_weights = config.model.init == "weights" and config.model.weights is None
    if needs_weights and weights_in(files) is None and not missing_shards(files)[0]:
        raise SmtrainError(
            folder_misfit(files, config.model.path)
            or f"{config.model.path} lacks model.safetensors and pytorch_model.bin; choose a"
            " revision or a model that has one"
        )
    return needed_files(files, config.model.weights is None)


if __name__ == "__main__":
    main(stage)
