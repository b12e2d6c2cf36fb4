"""Find the model that a path jumpstart://MODEL_ID[@VERSION] names, in JumpStart's public bucket.

The layout is that of the SageMaker SDK (sagemaker.core.jumpstart 2.27: constants, cache, types,
artifacts/model_uris): `models_manifest.json` in the bucket jumpstart-cache-prod-REGION lists
`model_id`, `version` and `spec_key`; the object of `spec_key` names the artifacts by their keys in
the same bucket. A model is gated if it has `gated_bucket` or `hosting_eula_key`.
"""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from smtrain.client.backends.choose import backend_of, sagemaker
from smtrain.client.backends.sagemaker.backend import SageMakerBackend
from smtrain.core.config import JobConfig
from smtrain.core.errors import ConfigError, JobError
from smtrain.core.files import parse_json, parse_object
from smtrain.core.protocol.uris import JUMPSTART_BUCKET, JUMPSTART_MODEL
from smtrain.core.suggest import hint

MANIFEST = "models_manifest.json"
_ARTIFACTS = ("training_artifact_key", "hosting_prepacked_artifact_key", "hosting_artifact_key")
"""Keys of a spec that may name a folder with the weights, in the order in which they are tried."""
_MODELS: dict[tuple[str, str], JumpStartModel] = {}
"""Models found by this process, by path and target: a search for a mesh asks many times, and a
version never changes.
"""


@dataclass(frozen=True)
class JumpStartModel:
    """A version of a model in JumpStart."""

    model_id: str
    version: str
    uri: str
    """Prefix of its Hugging Face folder, which ends in "/"."""
    model_config: dict[str, Any]
    """Its config.json."""

    def __str__(self) -> str:
        return f"{self.model_id} {self.version} (JumpStart)"


def planned_model(config: JobConfig) -> JumpStartModel:
    """The model of a config's jumpstart:// path, found once. Raises like `model_on`."""
    path = config.model.path
    if (path, config.target) not in _MODELS:
        place = sagemaker(backend_of(config))
        _MODELS[path, config.target] = model_on(path, place)
    return _MODELS[path, config.target]


def model_on(path: str, place: SageMakerBackend) -> JumpStartModel:
    """The model of a jumpstart:// path in the region of a backend.

    Raises `ConfigError` if it is unknown, gated, or has no folder of weights; `JobError` if the
    bucket cannot be read.
    """
    match = JUMPSTART_MODEL.fullmatch(path)
    assert match  # the checks of model.path have seen to it
    model_id, version = match.groups()
    bucket = f"{JUMPSTART_BUCKET}{place.region_name()}"
    row = _row(path, model_id, version, parse_json(place.read(f"s3://{bucket}/{MANIFEST}")))
    spec = parse_object(place.read(f"s3://{bucket}/{row['spec_key']}"))
    if spec.get("gated_bucket") or spec.get("hosting_eula_key"):
        key = spec.get("hosting_eula_key") or "named on its page in SageMaker Studio"
        agreement = f"s3://{bucket}/{key}" if spec.get("hosting_eula_key") else key
        raise ConfigError(
            f"model.path: {model_id} {row['version']} is gated: its end-user agreement ({agreement})"
            " must be accepted in JumpStart, which smtrain cannot do; name the model on the hub"
            " (hf://, with model.token)",
            code="config.combination",
        )
    keys = [str(spec[name]) for name in _ARTIFACTS if spec.get(name)]
    for key in keys:
        uri = f"s3://{bucket}/{key.rstrip('/')}/"
        if not key.endswith((".tar.gz", ".tgz", ".tar")) and (config := _config_at(place, uri)):
            return JumpStartModel(model_id, row["version"], uri, config)
    archive = f" ({keys[0]} is an archive)" if keys else ""
    raise ConfigError(
        f"model.path: {model_id} {row['version']} has no folder with a config.json{archive}; unpack"
        " it, and give the folder",
        code="model.not_found",
    )


def _row(path: str, model_id: str, version: str | None, manifest: Any) -> dict[str, Any]:
    """The manifest's row of a model: the newest version, or the newest that `version` names, in
    which * stands for any text.
    """
    rows = [row for row in manifest if row["model_id"] == model_id]
    if not rows:
        raise ConfigError(
            f"model.path: JumpStart has no model {model_id};"
            f" {hint(model_id, {row['model_id'] for row in manifest})}",
            code="model.not_found",
        )
    matches = [row for row in rows if fnmatchcase(row["version"], version or "*")]
    if not matches:
        versions = ", ".join(sorted((row["version"] for row in rows), key=_order))
        raise ConfigError(
            f"model.path: {path}: JumpStart has no such version; it has {versions}",
            code="model.not_found",
        )
    newest: dict[str, Any] = max(matches, key=lambda row: _order(row["version"]))
    return newest


def _order(version: str) -> tuple[int, ...]:
    return tuple(int(part) if part.isdecimal() else -1 for part in version.split("."))


def _config_at(place: SageMakerBackend, uri: str) -> dict[str, Any] | None:
    try:
        return parse_object(place.read(f"{uri}config.json"))
    except (JobError, ValueError):
        return None
