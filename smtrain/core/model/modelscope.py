"""List and download models of ModelScope.

Standard library only: no image of AWS has ModelScope's client, and two kinds of request are enough.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from smtrain.core.errors import SmtrainError

SITE = "https://modelscope.cn"
BRANCH = "master"
_TRIES = 6
_PAUSE_S = 2.0
_QUIET_S = 60
"""Seconds without data after which a connection counts as broken."""
_BLOCK = 4 << 20
_AT_ONCE = 4


@dataclass(frozen=True)
class RepositoryFile:
    """A file as ModelScope lists it."""

    path: str
    size: int
    sha256: str | None
    commit: str
    """The commit that last changed it, at which it is downloaded."""


def site() -> str:
    """ModelScope's address, or the one that MODELSCOPE_ENDPOINT names."""
    address = os.environ.get("MODELSCOPE_ENDPOINT", "").strip().rstrip("/") or SITE
    return address if "://" in address else f"https://{address}"


def list_files(
    name: str, revision: str | None = None, token: str | None = None
) -> tuple[str, list[RepositoryFile]]:
    """The newest commit of a branch, tag or commit (None: the main branch), and its files.

    Raises `SmtrainError` if ModelScope refuses, cannot be reached, or gives an unexpected answer.
    """
    query = urlencode({"Revision": revision or BRANCH, "Recursive": "true"})
    try:
        with _open_url(f"{site()}/api/v1/models/{quote(name)}/repo/files?{query}", token) as answer:
            entries = json.load(answer)["Data"]["Files"]
        blobs = [item for item in entries if item.get("Type") != "tree"]
        files = [
            RepositoryFile(
                str(i["Path"]),
                int(i["Size"]),
                str(i.get("Sha256") or "") or None,
                str(i["Revision"]),
            )
            for i in blobs
        ]
        commit = str(max(blobs, key=lambda item: int(item.get("CommittedDate") or 0))["Revision"])
    except urllib.error.HTTPError as error:
        error.close()
        raise SmtrainError(
            f"{site()} refuses {name} at {revision or BRANCH} ({error.code} {error.reason}); check"
            " its name and revision, and for a private model its token (model.token)",
            code="model.not_found",
        ) from None
    except (OSError, http.client.HTTPException) as error:
        raise SmtrainError(
            f"{site()} cannot be reached ({type(error).__name__}); check the network and try again,"
            " or name another (MODELSCOPE_ENDPOINT)"
        ) from None
    except (
        KeyError,
        TypeError,
        ValueError,
        AttributeError,
    ):  # ValueError: no JSON, or no files at all
        raise SmtrainError(
            f"{site()} lists no files of {name} at {revision or BRANCH}; check its name and"
            " revision",
            code="model.not_found",
        ) from None
    return commit, files


def fetch(
    name: str, files: Iterable[RepositoryFile], folder: Path, token: str | None = None
) -> None:
    """Download files into a folder, each at its commit. Raises `SmtrainError` for one that does not
    arrive completely.
    """
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        for _ in pool.map(
            lambda file: _download_file(name, file, folder / file.path, token), files
        ):
            pass


def _download_file(name: str, file: RepositoryFile, target: Path, token: str | None) -> None:
    query = urlencode({"Revision": file.commit, "FilePath": file.path})
    part = target.with_name(f"{target.name}.part")
    part.unlink(missing_ok=True)
    reason = "it was cut short"
    for attempt in range(_TRIES):
        if attempt:
            time.sleep(_PAUSE_S * attempt)
        have = part.stat().st_size if part.exists() else 0
        try:
            with _open_url(
                f"{site()}/api/v1/models/{quote(name)}/repo?{query}", token, have
            ) as answer:
                _append(answer, part, have)
        except urllib.error.HTTPError as error:
            error.close()
            reason = f"{error.code} {error.reason}"
            if error.code < 500 and error.code != 429:
                break
        except (OSError, http.client.HTTPException) as error:  # keep what has arrived so far
            reason = type(error).__name__
        if part.exists() and part.stat().st_size >= file.size:
            if part.stat().st_size == file.size and file.sha256 in (None, _sha256(part)):
                part.replace(target)
                return
            reason = "it is not what ModelScope lists"
            part.unlink()
    part.unlink(missing_ok=True)
    raise SmtrainError(f"{file.path} of {name} did not arrive from {site()} ({reason}); try again")


def _append(answer: Any, part: Path, have: int) -> None:
    """Append the answer to the file; replace the file if the server sent everything again."""
    with part.open("ab" if have and answer.status == 206 else "wb") as out:
        while block := answer.read(_BLOCK):
            out.write(block)


def _open_url(url: str, token: str | None, start: int = 0) -> Any:
    request = urllib.request.Request(url, headers={"User-Agent": "smtrain"})  # noqa: S310 - ModelScope's, or the user's own
    if start:
        request.add_header("Range", f"bytes={start}-")
    if token:  # not for the host that a download is redirected to
        request.add_unredirected_header("Authorization", f"Bearer {token}")
        request.add_unredirected_header("Cookie", f"m_session_id={token}")
    return urllib.request.urlopen(request, timeout=_QUIET_S)  # noqa: S310


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()
