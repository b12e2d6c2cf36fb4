"""`smtrain serve`: vLLM or transformers' own server for a model's folder, OpenAI-compatible, on 127.0.0.1."""

from __future__ import annotations

import contextlib
import http.client
import importlib.metadata
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Literal, get_args

from smtrain.core import text
from smtrain.core.errors import ConfigError, JobError
from smtrain.core.extras import present
from smtrain.core.facts.sagemaker import TargetName
from smtrain.core.near import hint
from smtrain.core.text import Say
from smtrain.tools.chat.resolve_model import FoundModel, find
from smtrain.worker.generation.memory_fit import refuse_too_large

Server = Literal["vllm", "transformers"]
_NEEDED = ("fastapi", "uvicorn", "openai")
_OLDEST = (4, 56)
"""First transformers whose `transformers serve` answers /v1/chat/completions."""


def servers() -> list[Server]:
    """Servers that are installed in this Python's environment, the better one first."""
    installed: list[Server] = []
    if present("vllm") and _program("vllm"):
        installed.append("vllm")
    if all(map(present, _NEEDED)) and _transformers() >= _OLDEST and _program("transformers"):
        installed.append("transformers")
    return installed


def serve(
    model: str, *, port: int = 8000, host: str = "127.0.0.1", server: Server | None = None,
    more: tuple[str, ...] = (), target: TargetName | None = None, say: Say = text.say,
) -> int:  # fmt: skip
    """Serve a model until the server ends, or Ctrl-C or SIGTERM ends it; return its exit status.

    `model` is what `smtrain chat` takes; a model in S3 is fetched first. `more` is passed to the server. Raises
    `ConfigError` if no server is installed, `CheckpointError` if there is no model or too little memory, `JobError` if
    the port is taken.
    """
    source = find(model, target)  # first: a wrong name is corrected sooner than a package is installed
    chosen = _chosen(server)
    if source.is_adapter and chosen != "vllm":
        raise ConfigError(
            f"{model} is a LoRA adapter, which transformers' server does not load; install vllm, or merge it with "
            "`smtrain convert BASE FOLDER --to hf --merge-adapter ADAPTER`",
            code="config.combination",
        )
    if chosen == "transformers":
        refuse_too_large([source.need])
    _refuse_taken(host, port)
    folder = source.fetch(say).resolve()
    if not source.is_adapter:
        from smtrain.worker.checkpoint.huggingface.folder import refuse_renamed

        refuse_renamed(folder)
    command = [*command_of(chosen, source, folder, host, port), *more]
    process = subprocess.Popen(command, env=environment_of(chosen))
    before = signal.signal(signal.SIGTERM, lambda *_: process.terminate())
    try:
        url = f"http://{host}:{port}"
        if _ready(url, process):
            name = name_of(chosen, source, folder)
            say(f"{model} answers at {url}/v1 (OpenAI's API, model {json.dumps(name)}) by {chosen}; Ctrl-C ends it")
        return process.wait()
    except KeyboardInterrupt:
        return 0
    finally:
        signal.signal(signal.SIGTERM, before)
        _end(process)


def command_of(server: Server, model: FoundModel, folder: Path, host: str, port: int) -> list[str]:
    """The command line of the server."""
    at = ["--host", host, "--port", str(port)]
    if server == "transformers":
        return [str(_program("transformers")), "serve", str(folder), *at]
    name = ["--served-model-name", name_of(server, model, folder)]
    if not model.is_adapter:
        return [str(_program("vllm")), "serve", str(folder), *at, *name]
    base = str(model.described.get("base_model_name_or_path") or "")
    if not base or base.startswith("s3://"):
        raise ConfigError(
            f"{model.name} names {base or 'no base model'}, which vLLM cannot load; download the base model and write "
            "its folder into base_model_name_or_path of adapter_config.json",
            code="config.wrong_value",
        )
    rank = max(8, int(model.described.get("r", 16)))
    lora = ["--enable-lora", "--max-lora-rank", str(rank), "--lora-modules", f"{name[1]}={folder}"]
    return [str(_program("vllm")), "serve", base, *at, *lora]


def environment_of(server: Server) -> dict[str, str]:
    """Environment of the server, with telemetry off."""
    if server == "transformers":
        from huggingface_hub.constants import HF_HUB_CACHE

        # Without this folder its list of models, which most clients ask for first, is an error 500.
        with contextlib.suppress(OSError):
            Path(HF_HUB_CACHE).mkdir(parents=True, exist_ok=True)
    return {**os.environ, "HF_HUB_DISABLE_TELEMETRY": "1", "DO_NOT_TRACK": "1"}


def name_of(server: Server, model: FoundModel, folder: Path) -> str:
    """The name that a client sends as `model`: transformers' server knows a folder only by its path."""
    return str(folder) if server == "transformers" else Path(model.name.rstrip("/")).name


def _chosen(server: Server | None) -> Server:
    if server is not None and server not in get_args(Server):
        raise ConfigError(f"server: got {server!r}; {hint(str(server), get_args(Server))}", code="config.wrong_value")
    installed = servers()
    if server is None and installed:
        return installed[0]
    if server in installed and server is not None:
        return server
    lacking = server or "vllm, nor a server of transformers"
    remedy = "pip install vllm" if server == "vllm" else "pip install 'transformers[serving]'"
    raise ConfigError(f"this Python has no {lacking}; `{remedy}` installs one", code="package.missing")


def _program(name: str) -> str | None:
    """A program next to this Python, or else on the PATH."""
    own = Path(sys.executable).with_name(name)
    return str(own) if own.is_file() else shutil.which(name)


def _transformers() -> tuple[int, ...]:
    try:
        version = importlib.metadata.version("transformers")
    except importlib.metadata.PackageNotFoundError:
        return (0,)
    return tuple(int(part) for part in version.split(".")[:2] if part.isdigit())


def _refuse_taken(host: str, port: int) -> None:
    import socket

    try:
        with socket.create_server((host, port)):
            pass
    except OSError as error:
        raise JobError(f"port {port} of {host} cannot be used ({error.strerror}); choose another with --port") from None


def _ready(url: str, process: subprocess.Popen[bytes], pause: Callable[[float], None] = time.sleep) -> bool:
    """Wait until the server answers; False if it ends before."""
    while process.poll() is None:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):  # noqa: S310 - of this machine
                return True
        except urllib.error.HTTPError as error:
            error.close()
            return True  # it answers, and has no such page
        except (OSError, http.client.HTTPException):
            pause(0.5)
    return False


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(15)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
