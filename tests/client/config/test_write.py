"""`smtrain config set` changes one value, and no other character of the file."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smtrain.cli.dispatch import call
from smtrain.client.config.write import with_value
from smtrain.core.errors import ConfigError
from smtrain.core.yaml_text import parse


@pytest.mark.parametrize(
    ("text", "changed"),
    [
        ("", "compute:\n  image: a:1\n"),
        ("# mine\n", "# mine\ncompute:\n  image: a:1\n"),
        ("name: x", "name: x\ncompute:\n  image: a:1\n"),
        ("compute:\n", "compute: {image: 'a:1'}\n"),
        ("compute: {}\n", "compute: {image: a:1}\n"),
        ("compute: {spot: true}  # cheap\n", "compute: {spot: true, image: a:1}  # cheap\n"),
        (
            "compute:\n    spot: true  # cheap\n\n# data\ndata: {}\n",
            "compute:\n    spot: true  # cheap\n    image: a:1\n\n# data\ndata: {}\n",
        ),
        (
            "compute:\n  image: old  # why\n  spot: true\n",
            "compute:\n  image: a:1  # why\n  spot: true\n",
        ),
        ("compute:\n  image: |\n    old\nname: x\n", "compute:\n  image: a:1\nname: x\n"),
        ("compute:\n  image:\n  spot: true\n", "compute:\n  image: a:1\n  spot: true\n"),
        (
            "compute:\n  network:\n    A: b\nname: x\n",
            "compute:\n  network:\n    A: b\n  image: a:1\nname: x\n",
        ),
        (
            "data:\n  sources:\n    - path: x\n",
            "data:\n  sources:\n    - path: x\ncompute:\n  image: a:1\n",
        ),
    ],
)
def test_the_rest_of_the_file_stays(text: str, changed: str) -> None:
    made = with_value(text, ["compute", "image"], "a:1")
    assert parse(made) == parse(changed)
    assert made == changed.replace("'a:1'", "a:1") or made.replace("'", "") == changed.replace(
        "'", ""
    )


@pytest.mark.parametrize(
    "text", ["compute: here\n", "a: &x {b: 1}\ncompute: *x\n", '{"compute":\t{}}']
)
def test_a_file_that_cannot_be_changed_safely_is_left_to_the_user(text: str) -> None:
    with pytest.raises(ConfigError, match="edit the file by hand"):
        with_value(text, ["compute", "image"], "a:1")


@given(
    st.dictionaries(
        st.sampled_from("abc"),
        st.one_of(st.integers(), st.text(max_size=9), st.lists(st.booleans())),
    ),
    st.booleans(),
    st.one_of(st.integers(), st.text(max_size=30), st.booleans(), st.lists(st.integers())),
)
def test_any_value_is_read_back(section: dict[str, object], flow: bool, value: object) -> None:
    import yaml

    text = yaml.safe_dump({"top": section, "last": 1}, default_flow_style=flow)
    if any(not str(one).isprintable() for one in (*section.values(), value)):
        return
    made = with_value(text, ["top", "b"], value)
    assert parse(made) == {"top": {**section, "b": value}, "last": 1}


SCALARS = [
    "1",
    "2e-4",
    "1_000",
    "0x10",
    "text",
    "'quoted'",
    "yes",
    "~",
    "&anchor 5",
    "a  b",
    "[a,b]",
    "{ a: 1 }",
]


@st.composite
def documents(draw: st.DrawFn) -> tuple[list[str], str]:
    """Lines of a commented config with values at its own spacing, and how they end."""
    comments = st.sampled_from(["", "  # why", " # two: words", "    # far"])
    indent = " " * draw(st.sampled_from([2, 4]))
    lines = draw(st.lists(st.sampled_from(["# head", "", "--- # first"]), max_size=1))
    for section in draw(
        st.lists(st.sampled_from(["name", "model", "data"]), min_size=1, unique=True)
    ):
        keys = (
            []
            if section == "name"
            else draw(st.lists(st.sampled_from(["path", "lr", "steps"]), unique=True))
        )
        gaps = st.sampled_from([" ", "   "])
        value = "" if keys else draw(gaps) + draw(st.sampled_from(SCALARS))
        lines.append(f"{section}:{value}{draw(comments)}")
        for key in keys:
            lines.append(
                f"{indent}{key}:{draw(gaps)}{draw(st.sampled_from(SCALARS))}{draw(comments)}"
            )
            lines += draw(
                st.lists(st.sampled_from(["", f"{indent}# between", "# left"]), max_size=1)
            )
    return lines, draw(st.sampled_from(["\n", "\r\n"]))


@given(documents(), st.sampled_from(["path", "lr", "steps"]))
def test_all_other_lines_keep_comments_anchors_spaces_and_ends(
    document: tuple[list[str], str], key: str
) -> None:
    lines, end = document
    before = [f"{line}{end}" for line in lines]
    try:
        made = with_value("".join(before), ["train", key], 7)
        made = with_value(made, ["name"], "mine")
    except ConfigError:
        return
    others = [line for line in before if not line.startswith("name:")]
    after = made.splitlines(keepends=True)
    assert [line for line in after if line in others] == others
    assert {line[-len(end) :] for line in after} == {end}
    assert made.count("\r") == (len(after) if end == "\r\n" else 0)
    assert parse(made) == {**parse("".join(before)), "name": "mine", "train": {key: 7}}


def test_nothing_is_written_if_the_key_or_the_value_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("model: {path: s3://b/m}\ndata: {path: s3://b/t}\ntrain:\n  steps: 5\n")
    path.chmod(0o640)
    before = path.read_text()
    for wrong, told in (
        ("train.stpes=5", "did you mean train.steps"),
        ("train.steps=x", "train.steps: "),
        ("train.steps", "must look like"),
        ("train.warmup_steps=7", "is more than train.steps"),
    ):
        assert call("config", "smtrain.cli.config", ["set", str(path), "train.lr=1e-4", wrong]) == 2
        assert told in capsys.readouterr().err
        assert path.read_text() == before
    assert (
        call("config", "smtrain.cli.config", ["set", str(path), "train.lr=1e-4", "name=mine"]) == 0
    )
    assert (
        path.read_text() == before.replace("steps: 5\n", "steps: 5\n  lr: 1e-4\n") + "name: mine\n"
    )
    assert path.stat().st_mode & 0o777 == 0o640
    assert call("config", "smtrain.cli.config", ["set", str(tmp_path / "no.yaml"), "name=x"]) == 2
    assert not (tmp_path / "no.yaml").exists()
