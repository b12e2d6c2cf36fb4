"""The keys of a config that may hold a URI."""

from __future__ import annotations

from smtrain.core.config.schema import JobConfig, inputs_of


def uris_of(config: JobConfig) -> list[tuple[str, str]]:
    """The keys that may hold a URI, with their values."""
    output_uris = (
        ("checkpoint.s3_uri", config.checkpoint.s3_uri),
        ("output.s3_uri", config.output.s3_uri),
    )
    return [*inputs_of(config), *((key, uri) for key, uri in output_uris if uri)]
