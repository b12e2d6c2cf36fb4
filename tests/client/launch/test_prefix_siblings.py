"""An s3:// input that begins other keys as well is refused before anything starts, as SageMaker
would read them.
"""

from __future__ import annotations

from typing import Any

import pytest
from botocore.exceptions import ClientError

from smtrain.client.launch.prefix_siblings import refuse_siblings, sibling_of
from smtrain.core.config import JobConfig
from smtrain.core.errors import ConfigError


def store(*keys: str) -> Any:
    def list_page(Bucket: str, Prefix: str, Delimiter: str) -> dict[str, Any]:
        found = [key for key in keys if key.startswith(Prefix)]
        below = {key: key[len(Prefix) :].partition(Delimiter) for key in found}
        return {
            "Contents": [{"Key": key} for key in found if not below[key][1]],
            "CommonPrefixes": [
                {"Prefix": p} for p in sorted({Prefix + a + d for a, d, _ in below.values() if d})
            ],
        }

    return list_page


@pytest.mark.parametrize(
    ("uri", "keys", "said"),
    [
        ("s3://b/data", ["data/a", "data2/b"], "also s3://b/data2/; write s3://b/data/"),
        (
            "s3://b/x/data",
            ["x/data/a", "x/data.txt"],
            "also s3://b/x/data.txt; write s3://b/x/data/",
        ),
        ("s3://b/data", ["data", "data/a"], "also s3://b/data; write s3://b/data/"),
        (
            "s3://b/a.jsonl",
            ["a.jsonl", "a.jsonl.bak"],
            "also s3://b/a.jsonl.bak; put it under a prefix without other data",
        ),
        ("s3://b/data", ["data/a", "data/deep/b", "other/c"], None),
        ("s3://b/data/", ["data/a", "data2/b"], None),
        ("s3://b/a.jsonl", ["a.jsonl"], None),
        ("s3://b/part-", ["part-1", "part-2"], None),
        ("s3://b", ["a", "b"], None),
        ("s3://b/nothing", [], None),
    ],
)
def test_siblings_of_a_prefix(uri: str, keys: list[str], said: str | None) -> None:
    found = sibling_of(store(*keys), uri)
    assert ("also {}; {}".format(*found) if found else None) == said


class Target:
    """The parts of a target that are asked."""

    def __init__(self, list_page: Any) -> None:
        self.s3 = self
        self.list_objects_v2 = list_page


def test_a_launch_names_the_key_and_is_silent_if_s3_does_not_tell() -> None:
    config = JobConfig.model_validate(
        {"name": "t", "model": {"path": "s3://b/model/"}, "data": {"path": "s3://b/data"}}
    )
    sources: list[Any] = [
        {"S3DataSource": {"S3Uri": uri}} for uri in ("s3://b/model/", "s3://b/data")
    ]
    sources.append({"FileSystemDataSource": {}})
    request = {
        "InputDataConfig": [
            {"ChannelName": str(n), "DataSource": source} for n, source in enumerate(sources)
        ]
    }
    with pytest.raises(
        ConfigError, match=r"data.path: SageMaker reads all keys that begin like s3://b/data, also"
    ):
        refuse_siblings(config, request, Target(store("data/a", "data-old/b")))  # type: ignore[arg-type]

    def denied(**_: Any) -> Any:
        raise ClientError({"Error": {"Code": "AccessDenied"}}, "ListObjectsV2")

    refuse_siblings(config, request, Target(denied))  # type: ignore[arg-type]
