"""Uploads: in parts that are resumed and checked, nothing abandoned, nothing but the model, of one
content.
"""

from __future__ import annotations

import base64
import hashlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from botocore.awsrequest import AWSResponse
from botocore.compat import HTTPHeaders

from smtrain.client.backends.sagemaker import s3
from smtrain.client.backends.sagemaker.backend import SageMakerBackend
from smtrain.client.backends.sagemaker.s3 import owner, send
from smtrain.client.launch.inputs import (
    Upload,
    _content_addressed,
    described_uploads,
    is_model_file,
    upload_all,
)
from smtrain.core.errors import JobError
from tests.typed import typed

PART = 5 << 20
SIZE = 3 * PART + 1234
BUCKET = "smtrain-local"


@pytest.fixture
def target(local_home: Path, monkeypatch: pytest.MonkeyPatch) -> SageMakerBackend:
    monkeypatch.setattr(s3, "PART", PART)
    return SageMakerBackend("local")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    path.write_bytes(os.urandom(SIZE))
    return path


@pytest.fixture
def key() -> str:
    return f"uploads-{time.time_ns()}/x"


@pytest.fixture
def calls(target: SageMakerBackend) -> Iterator[list[tuple[str, dict[str, Any]]]]:
    """Every S3 call's operation and parameters, as they leave."""
    made: list[tuple[str, dict[str, Any]]] = []

    def note(params: dict[str, Any], model: Any, **_: Any) -> None:
        made.append((model.name, dict(params)))

    target.s3.meta.events.register("provide-client-params.s3", note)
    yield made
    target.s3.meta.events.unregister("provide-client-params.s3", note)


def sha(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def begun(target: SageMakerBackend, key: str) -> list[dict[str, Any]]:
    found = target.s3.list_multipart_uploads(Bucket=BUCKET, Prefix=key).get("Uploads", [])
    return [upload for upload in found if upload["Key"] == key]


def content(target: SageMakerBackend, key: str) -> bytes:
    return bytes(target.s3.get_object(Bucket=BUCKET, Key=key)["Body"].read())


def sent_parts(calls: list[tuple[str, dict[str, Any]]]) -> list[int]:
    return sorted(params["PartNumber"] for name, params in calls if name == "UploadPart")


def test_a_large_file_goes_in_parts_with_checksums_and_the_owner(
    target: SageMakerBackend, file: Path, key: str, calls: list[tuple[str, dict[str, Any]]]
) -> None:
    assert send(target, BUCKET, key, file, sha(file)) == 0
    assert content(target, key) == file.read_bytes()
    assert sent_parts(calls) == [1, 2, 3, 4]
    moved = [
        params
        for name, params in calls
        if name in ("UploadPart", "CreateMultipartUpload", "ListMultipartUploads")
    ]
    assert all(params["ExpectedBucketOwner"] == "123456789012" for params in moved)
    assert all(
        len(params["ChecksumSHA256"]) == 44 for name, params in calls if name == "UploadPart"
    )
    assert not begun(target, key)


def test_a_killed_upload_is_gone_on_with(
    target: SageMakerBackend,
    file: Path,
    key: str,
    calls: list[tuple[str, dict[str, Any]]],
    local_home: Path,
) -> None:
    """kill -9 when the third part is about to be sent: the next call sends what is missing, and
    nothing is left.
    """
    program = (
        "import os, signal, sys, time\n"
        "from pathlib import Path\n"
        "from smtrain.client.backends.sagemaker import s3\n"
        "from smtrain.client.backends.sagemaker.backend import SageMakerBackend\n"
        f"s3.PART, s3.SENDERS, target = {PART}, 1, SageMakerBackend('local')\n"
        "def die(params, **_):\n"
        "    if params['PartNumber'] == 3:\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "target.s3.meta.events.register('provide-client-params.s3.UploadPart', die)\n"
        f"s3.send(target, {BUCKET!r}, {key!r}, Path(sys.argv[1]), None)\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(file)], check=False)
    assert done.returncode == -9
    assert len(begun(target, key)) == 1
    assert send(target, BUCKET, key, file, sha(file)) == 2 * PART
    assert sent_parts(calls) == [3, 4]
    assert content(target, key) == file.read_bytes()
    assert not begun(target, key)


def test_parts_of_another_content_are_sent_again(
    target: SageMakerBackend, file: Path, key: str, calls: list[tuple[str, dict[str, Any]]]
) -> None:
    begin_with(target, key, [os.urandom(PART), file.read_bytes()[PART : 2 * PART]])
    calls.clear()
    assert send(target, BUCKET, key, file, sha(file)) == PART
    assert sent_parts(calls) == [1, 3, 4]
    assert content(target, key) == file.read_bytes()


def begin_with(target: SageMakerBackend, key: str, parts: list[bytes]) -> None:
    upload = target.s3.create_multipart_upload(Bucket=BUCKET, Key=key)["UploadId"]
    for number, part in enumerate(parts, 1):
        target.s3.upload_part(Bucket=BUCKET, Key=key, UploadId=upload, PartNumber=number, Body=part)


def test_parts_of_another_size_are_thrown_away(
    target: SageMakerBackend, file: Path, key: str
) -> None:
    begin_with(target, key, [os.urandom(PART + 1)])
    assert send(target, BUCKET, key, file, sha(file)) == 0
    assert content(target, key) == file.read_bytes()
    assert not begun(target, key)


@pytest.mark.parametrize("size", [SIZE, 1000])
def test_a_file_that_was_edited_since_it_was_named_is_refused_and_leaves_nothing(
    target: SageMakerBackend, tmp_path: Path, key: str, size: int
) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(os.urandom(size))
    named = sha(path)
    with path.open("r+b") as edited:
        edited.seek(size - 1)
        edited.write(b"\x00" if path.read_bytes()[-1] else b"\x01")
    with pytest.raises(JobError, match="was changed while it was being uploaded"):
        send(target, BUCKET, key, path, named)
    assert not begun(target, key)
    assert not target.s3.list_objects_v2(Bucket=BUCKET, Prefix=key).get("Contents")


def test_an_answer_that_is_lost_when_an_upload_is_completed_is_found_out(
    target: SageMakerBackend, file: Path, key: str
) -> None:
    from testing.plane import plane

    switches = plane()
    switches.calm()
    try:
        switches.faults(operations="s3:CompleteMultipartUpload", drops=1.0, after=1, times=1)
        send(target, BUCKET, key, file, sha(file))
    finally:
        switches.calm()
    assert content(target, key) == file.read_bytes()


def test_the_owner_is_named_where_the_name_of_the_bucket_tells_it() -> None:
    there = SageMakerBackend("aws", "eu-north-1")
    assert owner(there, "sagemaker-eu-north-1-111122223333") == {
        "ExpectedBucketOwner": "111122223333"
    }
    assert owner(there, "team-bucket-111122223333") == {}


BESIDE = (
    "credentials.txt",
    "id_rsa",
    "service-account.json",
    "notes.md",
    ".env",
    ".git/config",
    "run.sh",
    "token.json",
    "tokens.json",
    "license_key.txt",
)
MODEL = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "merges.txt",
    "vocab.json",
    "model-00001-of-00002.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "chat_template.jinja",
    "tekken.json",
    "additional_chat_templates/tools.jinja",
    "modeling_own.py",
    "preprocessor_config.json",
    "README.md",
    "LICENSE",
    "USE_POLICY.md",
)


@pytest.mark.parametrize("small", [0, 1 << 20])
def test_only_what_models_consist_of_is_uploaded(
    target: SageMakerBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small: int
) -> None:
    for name in (*MODEL, *BESIDE):
        path = tmp_path / "model" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("{}")
    found = _content_addressed(
        tmp_path / "model", f"s3://{BUCKET}/only-{time.time_ns()}", is_model_file
    )
    assert sorted(name for name, _ in found.files) == sorted(MODEL)
    assert set(found.left_out) == {name for name in BESIDE if not name.startswith(".")}
    monkeypatch.setattr("smtrain.client.launch.inputs.SMALL", small)
    said: list[str] = []
    upload_all(target, [found], said.append)
    assert any(
        line.startswith("not uploaded, as no part of a model: credentials.txt") for line in said
    )
    prefix = found.uri.removeprefix(f"s3://{BUCKET}/")
    there = target.s3.list_objects_v2(Bucket=BUCKET, Prefix=prefix)["Contents"]
    assert {item["Key"].removeprefix(prefix) for item in there} == set(MODEL)
    assert f"    left out  {'id_rsa'}" in described_uploads([found])


def test_text_is_uploaded_whole(tmp_path: Path) -> None:
    (tmp_path / "credentials.txt").write_text("a text about credentials")
    found: Upload = _content_addressed(tmp_path, "s3://b/x")
    assert [name for name, _ in found.files] == ["credentials.txt"]


@pytest.mark.parametrize("command", [["launch", "--stage", "convert"], ["run"]])
def test_the_command_line_lists_them_and_sends_nothing(
    raw: dict[str, Any], tmp_path: Path, local_home: Path, command: list[str]
) -> None:
    (Path(raw["model"]["path"]) / "id_rsa").write_text("x")
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({**raw, "target": "local"}))
    done = typed(command[0], str(tmp_path / "run.yaml"), *command[1:], "--show-uploads")
    assert done.returncode == 0, done.stderr
    out = done.stdout
    assert "config.json" in out
    assert "left out  id_rsa" in out
    assert "bundle.tar.gz" in out


@pytest.mark.parametrize("size", [PART + 1234, 600 << 10])
def test_a_changed_byte_in_s3_is_sent_again_and_no_other_file(
    target: SageMakerBackend,
    tmp_path: Path,
    key: str,
    size: int,
    calls: list[tuple[str, dict[str, Any]]],
) -> None:
    """In parts and in one piece, a byte in its middle and its last one."""
    files = {name: os.urandom(size) for name in ("a", "b")}
    for name, body in files.items():
        (tmp_path / name).write_bytes(body)
    uri = f"s3://{BUCKET}/{key}/"
    upload = Upload(
        uri,
        tuple((name, tmp_path / name) for name in files),
        tuple(sha(tmp_path / name) for name in files),
    )
    upload_all(target, [upload], lambda _: None)
    for at in (size // 2, size - 1):
        changed = bytearray(files["a"])
        changed[at] ^= 1
        if size > PART:
            copy_in_parts(target, f"{key}/a", bytes(changed))
        else:
            target.s3.put_object(Bucket=BUCKET, Key=f"{key}/a", Body=bytes(changed))
        calls.clear()
        upload_all(target, [upload], lambda _: None)
        assert content(target, f"{key}/a") == files["a"]
        sent = {
            params["Key"]
            for name, params in calls
            if name in ("PutObject", "CreateMultipartUpload")
        }
        assert sent == {f"{key}/a"}


def copy_in_parts(target: SageMakerBackend, key: str, body: bytes) -> None:
    begun = target.s3.create_multipart_upload(Bucket=BUCKET, Key=key)["UploadId"]
    place = {"Bucket": BUCKET, "Key": key, "UploadId": begun}
    parts = [
        {
            "PartNumber": number,
            "ETag": target.s3.upload_part(
                **place, PartNumber=number, Body=body[start : start + PART]
            )["ETag"],
        }
        for number, start in enumerate(range(0, len(body), PART), 1)
    ]
    target.s3.complete_multipart_upload(**place, MultipartUpload={"Parts": parts})


@pytest.mark.parametrize("size", [SIZE, 1000])
def test_an_etag_that_is_no_md5_is_replaced_by_the_checksum_of_the_upload(
    target: SageMakerBackend, tmp_path: Path, size: int, request: pytest.FixtureRequest
) -> None:
    """With SSE-KMS.

    S3 keeps the SHA-256 with the object; of one in parts that of their SHA-256s, and their number.
    """
    body = os.urandom(size)
    (tmp_path / "a").write_bytes(body)
    parts = [hashlib.sha256(body[start : start + PART]).digest() for start in range(0, size, PART)]
    whole = parts[0] if len(parts) == 1 else hashlib.sha256(b"".join(parts)).digest()
    kept = base64.b64encode(whole).decode() + (f"-{len(parts)}" if len(parts) > 1 else "")

    def answer(model: Any, params: dict[str, Any], **_: Any) -> tuple[Any, dict[str, Any]]:
        assert params["headers"]["x-amz-checksum-mode"] == "ENABLED"
        return AWSResponse("", 200, HTTPHeaders(), None), {"ChecksumSHA256": kept}

    target.s3.meta.events.register("before-call.s3.HeadObject", answer)
    request.addfinalizer(
        lambda: target.s3.meta.events.unregister("before-call.s3.HeadObject", answer)
    )
    item = {"Key": "a", "Size": size, "ETag": '"of-kms"'}
    assert s3.has_content(target, BUCKET, item, tmp_path / "a")
    (tmp_path / "a").write_bytes(bytes([body[0] ^ 1]) + body[1:])
    assert not s3.has_content(target, BUCKET, item, tmp_path / "a")
