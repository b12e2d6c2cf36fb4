"""Statements that AWS's newer documents have ended stand nowhere any more, and the facts that took
their place have a source or a date.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ENDED = {
    "2.30 supports XLA": r"2\.30[^.|\n]{0,60}last release (that|to) support",
    "one end of NxD": r"ended with 2\.32",
    "an unread list": r"list of 2\.33 was not readable",
    "Neuron endpoints refused by NxD's end": r"AWS ends NxD Inference",
    "QLoRA in Optimum Neuron": r"Optimum Neuron",
    "22.04 for every cluster": r"\[default: ubuntu2204\]",
}
FACTS = {
    "docs/trainium-reference.md": (
        r"2\.29\.1 \| the last release that supports training with PyTorch/XLA",
        r"2\.28 \| AWS's advice in three announcements",
        r"last release of NxD Training",
        r"aws-neuron-sdk 81ce03a \(2026-08-21\)",
        r"guide teaches pipelines on torch\.distributed \(2026-10-15\)",
        r"contradict each other",
        r"shows the\s+interval of speed, time and dollars first",
    ),
    "docs/trainium.md": (r"botocore 1\.44\.8",),
    "docs/launch-reference.md": (
        r"first part of 2\.33's list \(2026-10-14\)",
        r"`TORCH_NEURONX_DISABLE_FALLBACK_EXECUTION` \| default 1",
    ),
    "docs/serve.md": (r"On ml\.trn2\.48xlarge the image is vLLM Neuron's",),
    "docs/request-70b.md": (r"trainium-reference\.md#what-has-ended",),
    "smtrain/core/facts/images.toml": (
        r"stay on 2\.28 \(announcements in aws-neuron-sdk 81ce03a\)",
    ),
}


def texts() -> dict[Path, str]:
    """The pages, the README, the facts and the sources that users read."""
    files = [
        ROOT / "README.md",
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "examples").rglob("*.yaml"),
        *(ROOT / "smtrain/core/facts").glob("*.toml"),
        *(ROOT / "smtrain/tools").rglob("*.py"),
    ]
    return {file: file.read_text("utf-8") for file in files}


def test_no_ended_statement_stands() -> None:
    found = [
        f"{file.relative_to(ROOT)}: {name}"
        for file, text in texts().items()
        for name, pattern in ENDED.items()
        if re.search(pattern, text)
    ]
    assert found == []


@pytest.mark.parametrize("page", FACTS)
def test_the_fact_in_its_place_is_there(page: str) -> None:
    text = (ROOT / page).read_text("utf-8")
    assert [pattern for pattern in FACTS[page] if not re.search(pattern, text)] == []


def test_a_newcomers_page_starts_on_no_ended_stack() -> None:
    for page in ("README.md", "docs/first-run-aws.md", "docs/index.md"):
        assert "trn1" not in (ROOT / page).read_text("utf-8"), page
