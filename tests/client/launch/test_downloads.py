"""Downloads replace nothing unasked, skip what is the same, and change nothing if they refuse."""

from __future__ import annotations

from pathlib import Path

import pytest

from smtrain.client.backends.sagemaker.backend import SageMakerBackend
from smtrain.client.jobs.results import download
from smtrain.core.errors import JobError

FILES = {"config.json": b"{}", "sub/weights.bin": b"w" * 5000, "in-parts.bin": b"p" * (6 << 20)}


@pytest.fixture(scope="module")
def uri(local_home: Path) -> str:
    target = SageMakerBackend("local")
    target.s3.create_bucket(Bucket="downloads")
    for name, content in FILES.items():
        if name != "in-parts.bin":
            target.s3.put_object(Bucket="downloads", Key=f"out/{name}", Body=content)
    begun = target.s3.create_multipart_upload(Bucket="downloads", Key="out/in-parts.bin")
    which = {"Bucket": "downloads", "Key": "out/in-parts.bin", "UploadId": begun["UploadId"]}
    cut = 5 << 20
    parts = [
        {"PartNumber": n, "ETag": target.s3.upload_part(**which, PartNumber=n, Body=body)["ETag"]}
        for n, body in ((1, FILES["in-parts.bin"][:cut]), (2, FILES["in-parts.bin"][cut:]))
    ]
    target.s3.complete_multipart_upload(**which, MultipartUpload={"Parts": parts})
    return "s3://downloads/out/"


def tree(folder: Path) -> dict[str, bytes]:
    return {
        p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()
    }


def test_a_second_download_leaves_what_is_the_same_and_goes_on(uri: str, tmp_path: Path) -> None:
    target = SageMakerBackend("local")
    assert download(target, [(uri, tmp_path)]) == 3
    assert tree(tmp_path) == FILES
    before = {path: path.stat().st_ino for path in tmp_path.rglob("*") if path.is_file()}
    (tmp_path / "sub/weights.bin").unlink()
    (tmp_path / "mine").write_text("kept")
    assert download(target, [(uri, tmp_path)]) == 3
    assert tree(tmp_path) == {**FILES, "mine": b"kept"}
    assert all(
        path.stat().st_ino == inode for path, inode in before.items() if path.name != "weights.bin"
    )


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("change", ["size", "content"])
def test_other_files_stay_unless_asked(uri: str, tmp_path: Path, name: str, change: str) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    mine = b"mine" if change == "size" else b"x" * len(FILES[name])
    (tmp_path / name).write_bytes(mine)
    with pytest.raises(
        JobError, match=rf"holds other files of the same names \({name}\).*--overwrite"
    ):
        download(SageMakerBackend("local"), [(uri, tmp_path)])
    assert tree(tmp_path) == {name: mine}
    download(SageMakerBackend("local"), [(uri, tmp_path)], overwrite=True)
    assert tree(tmp_path) == FILES


def test_what_no_flag_replaces(uri: str, tmp_path: Path) -> None:
    target = SageMakerBackend("local")
    (tmp_path / "file").write_text("mine")
    (tmp_path / "a/config.json").mkdir(parents=True)
    (tmp_path / "b").mkdir()
    (tmp_path / "b/sub").write_text("mine")
    before = tree(tmp_path)
    for folder, said in (
        ("file", "is a file; name a folder"),
        ("a", "is a folder, but the download has a file of this name"),
        ("b", "is a file, but the download has a folder of this name"),
    ):
        with pytest.raises(JobError, match=said):
            download(target, [(uri, tmp_path / folder)], overwrite=True)
    assert tree(tmp_path) == before


def test_what_a_running_job_deletes_meanwhile_leaves_no_half_of_a_folder(
    local_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = SageMakerBackend("local")
    fetch = SageMakerBackend.fetch
    target.s3.create_bucket(Bucket="pruned")
    for step in (2, 4, 6):
        for name in ("a", "b", "manifest.json"):
            target.s3.put_object(Bucket="pruned", Key=f"out/step_{step}/{name}", Body=b"x")

    def delayed(self: SageMakerBackend, bucket: str, key: str, path: Path) -> None:
        if key.endswith("step_2/b"):
            for name in ("a", "b", "manifest.json"):
                target.s3.delete_object(Bucket="pruned", Key=f"out/step_2/{name}")
        fetch(self, bucket, key, path)

    listing, asked = SageMakerBackend.listing, []
    monkeypatch.setattr(SageMakerBackend, "fetch", delayed)
    monkeypatch.setattr(
        SageMakerBackend, "listing", lambda self, uri: asked.append(uri) or listing(self, uri)
    )
    assert download(target, [("s3://pruned/out/", tmp_path)]) == 6
    assert len(asked) == 3, "at the beginning, for the first missing file, and at the end"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_4", "step_6"]
    assert len(tree(tmp_path)) == 6


def test_an_object_that_cannot_be_fetched_is_an_error(
    uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(self: SageMakerBackend, bucket: str, key: str, path: Path) -> None:
        raise JobError("denied")

    monkeypatch.setattr(SageMakerBackend, "fetch", refused)
    with pytest.raises(JobError, match="denied"):
        download(SageMakerBackend("local"), [(uri, tmp_path)])


def test_a_key_that_leads_out_is_refused(uri: str, tmp_path: Path) -> None:
    target = SageMakerBackend("local")
    target.s3.put_object(Bucket="downloads", Key="bad/../../x", Body=b"x")
    with pytest.raises(JobError, match="points outside"):
        download(target, [("s3://downloads/bad/", tmp_path / "to")])
    assert tree(tmp_path) == {}


def test_weights_never_come_next_to_those_of_another_model(uri: str, tmp_path: Path) -> None:
    target = SageMakerBackend("local")
    for name in ("config.json", "model-1-of-1.safetensors"):
        target.s3.put_object(Bucket="downloads", Key=f"model/{name}", Body=b"{}")
    (tmp_path / "model.safetensors").write_bytes(b"old")
    (tmp_path / "notes.txt").write_text("mine")
    for overwrite in (False, True):
        with pytest.raises(
            JobError, match=r"parts of another model \(model.safetensors\); delete them, or name"
        ):
            download(target, [("s3://downloads/model/", tmp_path)], overwrite=overwrite)
    (tmp_path / "model.safetensors").unlink()
    assert download(target, [("s3://downloads/model/", tmp_path)]) == 2


def test_objects_that_change_meanwhile_are_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, fetch = SageMakerBackend("local"), SageMakerBackend.fetch
    target.s3.create_bucket(Bucket="changing")
    target.s3.put_object(Bucket="changing", Key="m/a", Body=b"aaa")

    def changing(self: SageMakerBackend, bucket: str, key: str, path: Path) -> None:
        target.s3.put_object(Bucket=bucket, Key=key, Body=b"bbb")
        fetch(self, bucket, key, path)

    with monkeypatch.context() as patch:
        patch.setattr(SageMakerBackend, "fetch", changing)
        with pytest.raises(
            JobError, match=r"changed while it was being copied; run the same command .*--overwrite"
        ):
            download(target, [("s3://changing/m/", tmp_path)])
    assert download(target, [("s3://changing/m/", tmp_path)], overwrite=True) == 1
    assert tree(tmp_path) == {"a": b"bbb"}
