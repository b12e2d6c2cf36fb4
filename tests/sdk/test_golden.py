"""The request of the 70B notebook, byte for byte, through boto3 and through the SDK of this environment.

The golden file is the body with its keys sorted and with the hashes of our own code, config and graphs replaced, as
they change with every release. After a wanted change `python -m tests.sdk.test_golden` writes it anew: review that.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

import smtrain
from tests.sdk.wire import canonical, sent

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = Path(__file__).parent / "golden/request-70b.json"
CONFIG = ROOT / "examples/llama-2-70b-trn1.yaml"


def pinned(body: str) -> str:
    """Job names, the bundle, the config and the graphs' cache by what they are instead of by their hash."""
    body = re.sub(r"llama-2-70b-(prepare|convert|train)-[0-9a-f]{8}", r"llama-2-70b-\1-HASH", body)
    return re.sub(r"/(code|configs|neuron-cache)/[0-9a-f]{16}(?=[/\"])", r"/\1/HASH", body)


@pytest.mark.parametrize("through_sdk", [False, True])
def test_the_70b_request_is_the_golden_one(through_sdk: bool) -> None:
    (body,) = sent(smtrain.request(CONFIG), through_sdk=through_sdk).bodies
    assert pinned(canonical(body)).encode() == GOLDEN.read_bytes()


def test_the_70b_request_is_what_the_page_shows() -> None:
    page = (ROOT / "docs/request-70b.md").read_text("utf-8")
    (shown,) = re.findall(r"```json\n(.*?)```", page, re.DOTALL)
    assert shown == GOLDEN.read_text("utf-8")


def test_boto3_sends_the_bytes_of_the_dry_run() -> None:
    """botocore writes JSON with the request's own order: nothing is added between dry run and wire."""
    wanted = smtrain.request(CONFIG)
    assert sent(wanted, through_sdk=False).bodies[0] == json.dumps(wanted).encode()


if __name__ == "__main__":
    (made,) = sent(smtrain.request(CONFIG), through_sdk=False).bodies
    GOLDEN.parent.mkdir(exist_ok=True)
    sys.exit(0 if GOLDEN.write_text(pinned(canonical(made)), "utf-8") else 1)
