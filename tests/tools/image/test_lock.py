"""Missing packages become exact wheels; the image's own packages stay."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

import pytest

from smtrain.core.errors import LocalError
from smtrain.tools.image.lock import Interpreter, download, resolve

HERE = Interpreter("3.12.3", "x86_64")


def wheel(folder: Path, name: str, version: str, *needs: str, tag: str = "py3-none-any") -> Path:
    """A package without code but with requirements."""
    about = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\nProvides-Extra: fast\n"
    about += "".join(f"Requires-Dist: {need}\n" for need in needs)
    path = folder / f"{name}-{version}-{tag}.whl"
    with zipfile.ZipFile(path, "w") as archive:
        info = f"{name}-{version}.dist-info"
        archive.writestr(f"{info}/METADATA", about)
        archive.writestr(
            f"{info}/WHEEL",
            f"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: {tag}\n",
        )
        archive.writestr(f"{info}/RECORD", "")
    return path


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder as pip's only source of packages."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


@pytest.mark.full
def test_the_newest_that_fits_and_what_it_needs_in_turn_but_nothing_that_is_there(
    index: Path, tmp_path: Path
) -> None:
    wheel(index, "top", "1.0")
    newest = wheel(
        index,
        "top",
        "2.0",
        "middle>=1",
        "torch>=2",
        'windows-only; sys_platform == "win32"',
        'old-python; python_version < "3.11"',
        'extra-only; extra == "fast"',
    )
    wheel(index, "middle", "1.5", "leaf[fast]<3")
    wheel(index, "leaf", "2.0", 'speed; extra == "fast"')
    wheel(index, "leaf", "3.0")
    wheel(index, "speed", "1.0", tag="cp312-cp312-manylinux_2_28_x86_64")
    wheel(index, "speed", "2.0", tag="cp311-cp311-manylinux_2_28_x86_64")
    pins = resolve(["top>=1  # train"], {"torch": "2.9.0+cpu"}, HERE)
    assert [f"{pin.name}=={pin.version}" for pin in pins] == [
        "leaf==2.0",
        "middle==1.5",
        "speed==1.0",
        "top==2.0",
    ]
    assert pins[-1].sha256 == hashlib.sha256(newest.read_bytes()).hexdigest()
    lock = tmp_path / "lock"
    lock.write_text("".join(f"{pin}\n" for pin in pins))
    assert len(download(lock, HERE, tmp_path / "wheels")) == 4
    newest.write_bytes(newest.read_bytes() + b" ")
    with pytest.raises(LocalError, match=r"pip: .*(hash|HASH)"):
        download(lock, HERE, tmp_path / "again")


def test_two_that_need_the_same_package_get_one_release_that_suits_both(index: Path) -> None:
    wheel(index, "one", "1.0", "shared>=1.5")
    wheel(index, "two", "1.0", "shared<2")
    for version in ("1.0", "1.6", "2.0"):
        wheel(index, "shared", version)
    pins = resolve(["one", "two"], {}, HERE)
    assert {pin.name: pin.version for pin in pins} == {"one": "1.0", "two": "1.0", "shared": "1.6"}


@pytest.mark.parametrize(
    ("lacking", "has", "sentence"),
    [
        (
            ["top>=1"],
            {"torch": "1.13.0"},
            "top 1.0 needs torch>=2, and the image is built around torch 1.13.0",
        ),
        (["top>=1"], {"top": "0.5"}, "the image has top 0.5, and the stages need top>=1"),
        (["nowhere>=1"], {}, "pip: No matching distribution found for nowhere>=1"),
    ],
)
def test_what_cannot_be_had_without_replacing_is_refused(
    index: Path, lacking: list[str], has: dict[str, str], sentence: str
) -> None:
    wheel(index, "top", "1.0", "torch>=2")
    with pytest.raises(LocalError, match=sentence.replace("+", r"\+")):
        resolve(lacking, has, HERE)


def test_nothing_lacking_asks_no_index(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", "/nowhere")
    assert resolve([], {"torch": "2.9"}, HERE) == []
