"""Every command warns of an image that AWS no longer patches, and names a newer one."""

from __future__ import annotations

from pathlib import Path

import pytest

import smtrain
from smtrain.cli.dispatch import call
from smtrain.core.facts.images import gpu_rows

REPO = Path(__file__).resolve().parents[2]
ROW = next(row for row in gpu_rows() if row["patched_until"] == "2026-10-15")
IMAGE = f"763104351884.dkr.ecr.us-east-2.amazonaws.com/{ROW['repository']}:{ROW['tag']}"
CONFIG = REPO / "tests/client/sdk/golden/p5.yaml"
SAID = (
    f"AWS's patches of {ROW['repository']}:{ROW['tag']} ended on 2026-10-15; leave compute.image"
    " out for "
)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("launch", ["--stage", "train", "--dry-run"]),
        ("launch", ["--stage", "export", "--dry-run"]),
        ("run", ["--dry-run"]),
        ("plan", []),
        ("tune", ["--over", "train.lr=1e-5,1e-4", "--dry-run"]),
    ],
)
def test_commands_say_it_once(
    name: str, words: list[str], capsys: pytest.CaptureFixture[str], local_home: Path
) -> None:
    assert call(
        name, f"smtrain.cli.{name}", [str(CONFIG), *words, "--set", f"compute.image={IMAGE}"]
    ) in (0, 1)
    out, err = capsys.readouterr()
    assert (out if name == "plan" else err).count(SAID) == 1
    call(name, f"smtrain.cli.{name}", [str(CONFIG), *words])
    assert "AWS's patches" not in "".join(capsys.readouterr())


def test_a_check_and_the_list_of_images_say_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("images", "smtrain.cli.images", []) == 0
    ended = [line for line in capsys.readouterr().out.splitlines() if line.endswith(" (ended)")]
    assert [line.split()[0] for line in ended] == [f"{ROW['repository']}:{ROW['tag']}"]


def test_images_that_are_built_on_or_fetched(
    capsys: pytest.CaptureFixture[str], local_home: Path
) -> None:
    for words in (
        ["pull", IMAGE],
        ["verify", IMAGE],
        ["build", str(CONFIG), "--base", IMAGE, "--print"],
    ):
        call("image", "smtrain.cli.image", words)
        assert SAID in capsys.readouterr().err, words
    assert smtrain.load_config(CONFIG).compute.image is None
