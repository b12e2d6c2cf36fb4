"""A command that installs the same smtrain: from git, a wheel or an index."""

from __future__ import annotations

import hashlib
import re
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from smtrain.core.files import parse_json
from smtrain.core.git import describe_commit
from smtrain.version import __version__

_URL = re.compile(r"(https?|ssh|git)://|[\w.-]+@[\w.-]+:")


def commands() -> list[str]:
    """Shell lines that install this smtrain; a source that other machines cannot reach is a
    comment.
    """
    source = _direct_url()
    if vcs := source.get("vcs_info"):
        return [
            "pip install 'smtrain @"
            f" {vcs.get('vcs', 'git')}+{source['url']}@{vcs.get('commit_id', '')}'"
        ]
    if "archive_info" in source:
        return _of_wheel(source)
    if "dir_info" in source or _is_checkout():
        return _of_checkout(
            Path(unquote(urlsplit(source["url"]).path)) if "url" in source else _root()
        )
    return [f"pip install smtrain=={__version__}"]


def _direct_url() -> dict[str, Any]:
    """The installer's record of the package's source (PEP 610); empty for a package from an
    index.
    """
    try:
        record = parse_json(metadata.distribution("smtrain").read_text("direct_url.json") or "{}")
    except (metadata.PackageNotFoundError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}


def _of_wheel(record: dict[str, Any]) -> list[str]:
    info, url = record["archive_info"], str(record.get("url", ""))
    digest = info.get("hashes", {}).get("sha256") or str(info.get("hash", "")).removeprefix(
        "sha256="
    )
    file = Path(unquote(urlsplit(url).path))
    if not digest and url.startswith("file:") and file.is_file():
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
    source = file.name if url.startswith("file:") else url
    return [f"pip install {source}" + (f"  # sha256 {digest}" if digest else "")]


def _of_checkout(folder: Path) -> list[str]:
    commit = describe_commit(folder)
    if commit is None:
        return [
            f"# smtrain {__version__}, from a folder without a git repository",
            "pip install FOLDER",
        ]
    head = [f"# smtrain {__version__}, from a checkout at git commit {commit}"]
    origin = _origin(folder)
    if origin and _URL.match(origin):
        return [*head, f"pip install 'smtrain @ git+{_plain(origin)}@{commit.split()[0]}'"]
    return [*head, f"git checkout {commit.split()[0]}", "pip install ."]


def _origin(folder: Path) -> str | None:
    try:
        words = ["git", "config", "remote.origin.url"]
        result = subprocess.run(
            words, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=5
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() or None


def _plain(origin: str) -> str:
    """The URL without a user's name or password, as pip takes it."""
    if "://" not in origin:  # git@host:organization/name
        host, _, path = origin.partition(":")
        return f"ssh://{host}/{path}"
    parts = urlsplit(origin)
    return (
        parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
        if parts.scheme != "ssh"
        else origin
    )


def _root() -> Path:
    import smtrain

    return Path(smtrain.__file__).parent.parent


def _is_checkout() -> bool:
    return (_root() / "pyproject.toml").is_file() and (_root() / ".git").exists()
