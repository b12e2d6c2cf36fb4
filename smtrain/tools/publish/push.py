"""`smtrain push`: an exported model to the Hugging Face hub, by the hub's own client."""

from __future__ import annotations

import os
import re
from pathlib import Path, PurePath, PurePosixPath
from typing import TYPE_CHECKING, Any

from smtrain.client.backends.checksums import sha256_of
from smtrain.core import text
from smtrain.core.errors import ConfigError, JobError, first_line
from smtrain.core.extras import missing_module
from smtrain.core.model.card import README, card, metadata, usage
from smtrain.core.model.hf_folder import SOURCE, WEIGHTS, is_legal
from smtrain.core.public_api import public
from smtrain.core.targets import TargetName
from smtrain.core.text import Say
from smtrain.tools.chat.resolve_model import FoundModel, find
from smtrain.worker.checkpoint.huggingface.damage import refuse_damaged

if TYPE_CHECKING:
    from huggingface_hub import HfApi

_REPO = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
_NOT_PUSHED = (".*", "**/.*", SOURCE, "*.part", "training_args.bin", "optimizer.pt")
"""Files that only matter on this machine."""
_OF_THE_HUB = {".gitattributes"}
_LOGIN = "log in with `hf auth login`, or set HF_TOKEN to a token that may write"


@public
def push(
    model: str,
    repository: str,
    *,
    private: bool = True,
    update: bool = False,
    revision: str | None = None,
    message: str | None = None,
    dry_run: bool = False,
    target: TargetName | None = None,
    say: Say = text.say,
) -> str:
    """Upload an exported model to a repository of the Hugging Face hub; the same call resumes
    after an interruption.

    The token is the one that `hf auth login` keeps or HF_TOKEN holds; HF_ENDPOINT names another
    hub. The model card is uploaded too; if the folder has none, a short one is written.

    Args:
        model: A folder, a run, a job that exported, or an s3:// prefix; a model in S3 is fetched
            first.
        repository: `organization/name`; created if it does not exist.
        private: Make a new repository private. An existing one stays as it is.
        update: Add to a repository that holds another model.
        revision: The branch. Default: the main one.
        message: The commit message. Default: names the run.
        dry_run: Say the files that would be uploaded, with their sizes. Needs no token, asks no hub
            and uploads nothing.
        target: `local` or `aws`, the target of the run.
        say: Called with each line.

    Returns:
        The address of the repository.

    Raises:
        ConfigError: The name is no repository name.
        CheckpointError: The folder holds no model.
        JobError: There is no such run, the hub refuses, or the repository holds another model.

    Examples:
        >>> smtrain.push("./no-such-folder", "me/llama")
        Traceback (most recent call last):
        smtrain.core.errors.CheckpointError: ./no-such-folder: there is no such folder
    """
    if not _REPO.fullmatch(repository):
        raise ConfigError(
            f"repository: got {repository!r}; it is organization/name, as in my-org/llama-medical",
            code="config.wrong_value",
        )
    source = find(model, target)
    if dry_run:
        return _dry_run(source, repository, private, say)
    try:
        from huggingface_hub import HfApi
    except ImportError:
        raise JobError(missing_module("huggingface_hub")) from None
    api = HfApi(library_name="smtrain")
    account_name = _may_write(api)
    remote_files = _remote_files(api, repository, revision)
    folder = source.fetch(say)
    refuse_damaged(folder)
    files = _files(folder)
    size = sum(path.stat().st_size for path in files.values())
    if remote_files and not update and (foreign_file := _foreign_file(remote_files, files)):
        raise JobError(
            f"{repository} holds another model ({foreign_file}); give another name, or add to it"
            " with --update (update=True)"
        )
    visible = "private" if private else "public"
    say(
        f"pushing {len(files)} files, {size / 1e9:,.2f} GB, to {api.endpoint}/{repository}"
        + (
            f" as {account_name}, a new {visible} repository"
            if remote_files is None
            else f" as {account_name}"
        )
    )
    try:
        if remote_files is None:
            api.create_repo(repository, private=private, exist_ok=True)
        if revision is not None:
            api.create_branch(repository, branch=revision, exist_ok=True)
        if README not in files:
            body = _card(source, folder, repository).encode()
            api.upload_file(
                path_or_fileobj=body, path_in_repo=README, repo_id=repository, revision=revision
            )
        api.upload_folder(
            repo_id=repository,
            folder_path=folder,
            revision=revision,
            ignore_patterns=list(_NOT_PUSHED),
            commit_message=message or f"{source.name} by smtrain",
        )
    except Exception as error:  # its own, httpx's and the disk's have no common class
        raise JobError(
            f"{_explain_hub_error(error, api.endpoint, repository)}; the same command resumes from"
            " there"
        ) from None
    address = f"{api.endpoint}/{repository}"
    say(f"pushed: {address}")
    return address


def _dry_run(source: FoundModel, repository: str, private: bool, say: Say) -> str:
    """Say the name and the bytes of each file of a push; the address of the repository.

    Asks no hub, needs no token, and fetches no model.
    """
    if source.store_copy is not None:
        inner = source.folder.relative_to(source.store_copy.folder).as_posix()
        prefix = "" if inner == "." else f"{inner}/"
        sizes = {
            name.removeprefix(prefix): stat.size
            for name, stat in source.store_copy.files.items()
            if name.startswith(prefix) and _is_pushed(PurePosixPath(name.removeprefix(prefix)))
        }
    else:
        sizes = {name: path.stat().st_size for name, path in _files(source.folder).items()}
    hub = os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")
    say(
        f"would push {len(sizes)} files, {sum(sizes.values()) / 1e9:,.2f} GB, to"
        f" {hub}/{repository}, {'private' if private else 'public'} if it is new"
    )
    for name, size in sorted(sizes.items()):
        say(f"  {size:>15,}  {name}")
    if README not in sizes:
        say(f"  {'new':>15}  {README}")
    return f"{hub}/{repository}"


def _may_write(api: HfApi) -> str:
    """The user of the token."""
    try:
        user: dict[str, Any] = api.whoami()
    except Exception as error:
        raise JobError(_explain_hub_error(error, api.endpoint)) from None
    return str(user.get("name", "?"))


def _remote_files(
    api: HfApi, repository: str, revision: str | None
) -> dict[str, tuple[int | None, str | None]] | None:
    """Size and sha256 of the files of a repository, if the hub knows them; None if it does not
    exist.
    """
    from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

    try:
        info = api.model_info(repository, revision=revision, files_metadata=True)
    except RevisionNotFoundError:
        return {}
    except RepositoryNotFoundError:
        return None
    except Exception as error:
        raise JobError(_explain_hub_error(error, api.endpoint, repository)) from None
    return {
        item.rfilename: (item.size, item.lfs.sha256 if item.lfs else None)
        for item in info.siblings or []
        if item.rfilename not in _OF_THE_HUB
    }


def _files(folder: Path) -> dict[str, Path]:
    """The files to push, by their names in the repository."""
    return {
        path.relative_to(folder).as_posix(): path
        for path in sorted(folder.rglob("*"))
        if path.is_file() and _is_pushed(path.relative_to(folder))
    }


def _is_pushed(path: PurePath) -> bool:
    """Whether a file belongs to the model, by its path in the folder."""
    is_hidden = any(part.startswith(".") for part in path.parts)
    return not is_hidden and not any(path.match(pattern) for pattern in _NOT_PUSHED)


def _foreign_file(
    remote_files: dict[str, tuple[int | None, str | None]], files: dict[str, Path]
) -> str:
    """A file that shows that a repository holds another model, not the rest of an interrupted push;
    else empty.
    """
    weights = {name for pair in WEIGHTS for name in pair}
    for name, (size, sha256) in sorted(remote_files.items()):
        local_file = files.get(name)
        if local_file is None:
            if name in weights or name.endswith((".safetensors", ".bin", ".gguf", ".pt")):
                return name
        elif sha256 is not None and (
            size != local_file.stat().st_size or sha256 != sha256_of(local_file)
        ):
            return name
    return ""


def _card(source: FoundModel, folder: Path, repository: str) -> str:
    """A README for a folder that has none."""
    legal = [path.name for path in folder.iterdir() if is_legal(path.name)]
    card_data = metadata(None, "", adapter=source.is_adapter, legal=legal)
    return card(
        repository.partition("/")[2], card_data, [usage(repository, adapter=source.is_adapter)]
    )


def _explain_hub_error(error: Exception, hub: str, repository: str | None = None) -> str:
    """Explain an error of the hub, with a remedy."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    place = f"{hub}/{repository}" if repository else hub
    if type(error).__name__ == "LocalTokenNotFoundError":
        return f"there is no token for {hub}; {_LOGIN}"
    if status == 401:
        return f"{hub} does not take the token; {_LOGIN}"
    if status == 403:
        return (
            f"the token may not write to {place}; take one with the right to write there, or"
            " another organization"
        )
    if status is not None:
        return f"{place} answered {status} ({text.clean(first_line(error))})"
    return f"{place} could not be reached ({text.clean(first_line(error))})"
