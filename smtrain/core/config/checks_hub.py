"""Faults of a config whose model or data is on a hub: names, the token, and whether the job gets there."""

from __future__ import annotations

import re
from collections.abc import Iterator

from smtrain.core.config.checks_data import Fault
from smtrain.core.config.schema import JobConfig
from smtrain.core.facts.models import is_gated
from smtrain.core.protocol.uris import HUBS

HUB = re.compile(r"(hf|modelscope)://([\w.-]+/[\w.-]+)(?:@([\w./-]+))?")
"""A model of the Hugging Face hub or of ModelScope: which of them, its id, and a revision."""


def gated_faults(config: JobConfig) -> Iterator[Fault]:
    """A model or data of the hub that is known to be gated, without a token. A mirror (HF_ENDPOINT) may ask for none.

    Loading does not ask this: a plan needs no token.
    """
    if config.model.token or config.compute.environment.get("HF_ENDPOINT"):
        return
    named = "a token kept in Secrets Manager or SSM must be named in model.token (docs/secrets.md)"
    if is_gated(path := config.model.path):
        name = HUB.fullmatch(path)
        copy = f"`hf download {name[2]} --local-dir FOLDER` with a token of yours" if name else "a download"
        yield (
            {"model.path", "model.token"},
            f"model.token: is missing, and {path} is gated: accept its licence on the hub, then {named}; or copy the "
            f"model here, {copy}, and give that folder",
        )
    for source in config.data.all_sources:
        if config.data.prepared is None and is_gated(source.path, data=True):
            yield (
                {"data.path", "model.token"},
                f"model.token: is missing, and {source.path} is gated: accept its licence on the hub, then {named}",
            )


def hub_faults(config: JobConfig) -> Iterator[Fault]:
    """What the config alone shows."""
    token, path = config.model.token, config.model.path
    if path.startswith(HUBS) and not HUB.fullmatch(path):
        scheme = path.partition("://")[0]
        yield {"model.path"}, f"model.path: {path} must look like {scheme}://organization/model@revision"
    if token and (token.secret is None) == (token.ssm is None):
        yield {"model.token"}, "model.token: must name one of secret (Secrets Manager) and ssm (a parameter)"
    paths = (path, *(source.path for source in config.data.all_sources))
    hubs = {scheme for scheme in HUBS for path in paths if path.startswith(scheme)}
    if token and not hubs:
        yield (
            {"model.token", "model.path"},
            "model.token: has no effect unless the model or the data is on a hub (hf://, modelscope://)",
        )
    if token and len(hubs) > 1:
        yield (
            {"model.token", "model.path"},
            "model.token: is the token of one hub, and model and data are on two; use a model or text that is in S3",
        )
    if config.network.isolation and path.startswith(HUBS):
        yield (
            {"network.isolation", "model.path"},
            "network.isolation: keeps the fetch stage from the hub; fetch the model once without it, and give its s3://",
        )
