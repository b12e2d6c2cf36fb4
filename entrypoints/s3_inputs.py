"""Copy inputs from S3 once to the folder that all nodes of a cluster see: `python s3_inputs.py
JOB_FOLDER SHARED`.

A prefix becomes `<shared>/s3/<hash>/data`, named after its objects: the next job finds it, and
other objects under the same prefix get another folder. `manifest.json` next to it lists the objects
and is written when all are there; until then the next attempt copies the missing ones.
`inputs.json` in the job's folder maps each URI to its folder.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

STREAMS = 8
ATTEMPTS = 12
SAY_S = 10.0


def list_objects(client: Any, bucket: str, prefix: str) -> list[tuple[str, str, int, str]]:
    """(key, name, size, etag) of the objects of a channel; of a folder, with its slash or not, only
    those in it.
    """
    pages = client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix)
    items = [
        item for page in pages for item in page.get("Contents", []) if not item["Key"].endswith("/")
    ]
    folder = prefix if not prefix or prefix.endswith("/") else f"{prefix}/"
    if any(item["Key"].startswith(folder) for item in items):
        items = [item for item in items if item["Key"].startswith(folder)]
    else:
        folder = prefix[: prefix.rfind("/") + 1]
    return [
        (item["Key"], item["Key"][len(folder) :], item["Size"], item["ETag"].strip('"'))
        for item in items
    ]


def sync_prefix(client: Any, uri: str, shared_folder: Path, say: Any) -> Path:
    """Copy a prefix's objects unless they are there; returns their folder.

    Raises SystemExit if it has no objects, or if they change meanwhile.
    """
    bucket, _, prefix = uri.removeprefix("s3://").partition("/")
    objects = list_objects(client, bucket, prefix)
    if not objects:
        raise SystemExit(f"{uri}: there is no object under it; check the bucket and the prefix")
    digest = hashlib.sha256(json.dumps([uri, objects]).encode()).hexdigest()[:16]
    place = shared_folder / "s3" / digest
    data, manifest = place / "data", place / "manifest.json"
    parts = (
        place / "parts" / f"{os.uname().nodename}.{os.getpid()}"
    )  # two jobs may copy the same prefix
    if manifest.exists():
        say(f"{uri} is in {data} since an earlier job")
        return data
    for _, name, _, _ in objects:
        if not (data / name).resolve().is_relative_to(data.resolve()):
            raise SystemExit(f"{uri}: the key {name!r} points outside its folder")
    missing_objects = [item for item in objects if not _is_present(data / item[1], item[2])]
    total, copied_bytes, said_at = sum(size for *_, size, _ in missing_objects), 0, time.monotonic()
    say(f"copying {total / 1e6:.1f} MB of {uri} to {data}")
    with ThreadPoolExecutor(STREAMS) as pool:
        copies = {
            pool.submit(_copy, client, bucket, key, data / name, parts / str(number)): size
            for number, (key, name, size, _) in enumerate(missing_objects)
        }
        for copy in as_completed(copies):
            try:
                copy.result()
            except OSError:
                if manifest.exists():  # another job has copied everything, and deleted our parts
                    return data
                raise
            copied_bytes += copies[copy]
            if time.monotonic() - said_at > SAY_S:
                said_at = time.monotonic()
                say(f"copied {copied_bytes / 1e6:.1f} of {total / 1e6:.1f} MB")
    if list_objects(client, bucket, prefix) != objects:
        raise SystemExit(
            f"{uri} changed while it was copied to {data}; launch again when it is complete"
        )
    rows = [{"key": key, "size": size, "etag": etag} for key, _, size, etag in objects]
    _write(manifest, json.dumps({"uri": uri, "objects": rows}, indent=1))
    shutil.rmtree(place / "parts", ignore_errors=True)  # also those of killed jobs
    return data


def _is_present(path: Path, size: int) -> bool:
    return path.exists() and path.stat().st_size == size


def _copy(client: Any, bucket: str, key: str, path: Path, part: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part.parent.mkdir(parents=True, exist_ok=True)
    client.download_file(bucket, key, str(part))
    part.replace(path)


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.uname().nodename}.{os.getpid()}.part")
    part.write_text(text, "utf-8")
    part.replace(path)


def main() -> None:
    job, shared_folder = Path(sys.argv[1]), Path(sys.argv[2])
    request = json.loads((job / "request.json").read_text("utf-8"))
    uris = {
        channel["DataSource"]["S3DataSource"]["S3Uri"] for channel in request["InputDataConfig"]
    }

    def say(text: str) -> None:
        stamp = datetime.now(timezone.utc).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        with open(job / "logs/algo-1.log", "ab", buffering=0) as log:
            log.write(f"{stamp} {text}\n".encode())

    try:
        try:
            import boto3
            from boto3.exceptions import Boto3Error
            from botocore.config import Config
            from botocore.exceptions import BotoCoreError, ClientError
        except ImportError:
            raise SystemExit(
                f"{sys.executable} has no boto3, which inputs in S3 need; install smtrain[train] in"
                " the nodes' Python (cluster.venv)"
            ) from None
        try:
            client = boto3.client(
                "s3", config=Config(retries={"mode": "standard", "total_max_attempts": ATTEMPTS})
            )
            folders = {
                uri: str(sync_prefix(client, uri, shared_folder, say))
                for uri in sorted(uris)
                if uri.startswith("s3://")
            }
        except (Boto3Error, BotoCoreError, ClientError) as error:
            raise SystemExit(
                f"inputs in S3 cannot be read ({error}); let the nodes' role list and read them, or"
                " pass a profile on (--export=AWS_PROFILE in cluster.sbatch)"
            ) from None
        except OSError as error:
            raise SystemExit(
                f"inputs in S3 cannot be copied to {shared_folder} ({error})"
            ) from None
    except SystemExit as failure:
        say(str(failure))
        _write(job / "nodes/algo-1/output/failure", str(failure))
        sys.exit(1)
    _write(job / "inputs.json", json.dumps(folders))


if __name__ == "__main__":
    main()
