"""`smtrain serve`: vLLM or transformers' own server for a model's folder, OpenAI-compatible, on
127.0.0.1.

The server itself listens on a Unix socket in a folder of this user; other users reach only `proxy`.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, Literal, get_args

from smtrain.core import text
from smtrain.core.errors import ConfigError, JobError
from smtrain.core.extras import present
from smtrain.core.suggest import hint
from smtrain.core.targets import TargetName
from smtrain.core.text import Say
from smtrain.tools.chat.resolve_model import FoundModel, find
from smtrain.worker.generation.memory_fit import refuse_too_large

Server = Literal["vllm", "transformers"]
_SERVING_PACKAGES = ("fastapi", "uvicorn", "openai", "httpx")
_TEMPLATE_OPTIONS: dict[Server, str] = {
    "vllm": "--default-chat-template-kwargs",
    "transformers": "--chat-template-kwargs",
}
"""The option of each server for defaults of `chat_template_kwargs`, which a request may have too.
"""
_OLDEST = (4, 56)
"""First transformers whose `transformers serve` answers /v1/chat/completions."""
_PREFIX, _LONGEST_PATH = "smtrain-serve-", 100
"""Prefix of the Unix socket's folder, and most bytes of its path: macOS has 104 with the closing
zero, Linux 108.
"""


def servers() -> list[Server]:
    """Servers that are installed in this Python's environment, the better one first."""
    names: list[Server] = []
    if present("vllm") and _program("vllm"):
        names.append("vllm")
    if (
        all(map(present, _SERVING_PACKAGES))
        and _transformers() >= _OLDEST
        and _program("transformers")
    ):
        names.append("transformers")
    return names


def serve(
    model: str,
    *,
    port: int = 8000,
    host: str = "127.0.0.1",
    server: Server | None = None,
    more: tuple[str, ...] = (),
    template_options: Mapping[str, Any] | None = None,
    target: TargetName | None = None,
    say: Say = text.say,
) -> int:
    """Serve a model until the server ends, or Ctrl-C or SIGTERM ends it; return its exit status.

    `model` is what `smtrain chat` takes; a model in S3 is fetched first. `more` is passed to the
    server, and `template_options` are the chat template's for requests that have none. Raises
    `ConfigError` if no server is installed, `CheckpointError` if there is no model or too little
    memory, `JobError` if the port is taken.
    """
    source = find(
        model, target
    )  # first: a wrong name is corrected sooner than a package is installed
    server_kind = _select_server(server)
    if source.is_adapter and server_kind != "vllm":
        raise ConfigError(
            f"{model} is a LoRA adapter, which transformers' server does not load; install vllm, or"
            " merge it with `smtrain convert BASE FOLDER --to hf --merge-adapter ADAPTER`",
            code="config.combination",
        )
    if server_kind == "transformers":
        refuse_too_large([source.need])
    if template_options:
        more = (*more, _TEMPLATE_OPTIONS[server_kind], json.dumps(template_options))
    with closing(_bind(host, port)) as listening:  # before a long download
        folder = source.fetch(say).resolve()
        from smtrain.worker.checkpoint.huggingface.damage import refuse_damaged

        refuse_damaged(folder)
        if not source.is_adapter:
            from smtrain.worker.checkpoint.huggingface.folder import refuse_renamed

            refuse_renamed(folder)
        authority = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        name = json.dumps(name_of(server_kind, source, folder))
        answers = (
            f"{model} answers at http://{authority}/v1 (OpenAI's API, model {name}) by"
            f" {server_kind}; Ctrl-C ends it"
        )
        with tempfile.TemporaryDirectory(prefix=_PREFIX, dir=_socket_folder()) as private:
            socket_path = f"{private}/server"
            command = [*command_of(server_kind, source, folder, socket_path), *more]
            return _run(
                command,
                environment_of(server_kind),
                socket_path,
                listening,
                host,
                lambda: say(answers),
            )


def _run(
    command: list[str],
    environment: dict[str, str],
    socket_path: str,
    listening: socket.socket,
    host: str,
    ready: Callable[[], None],
) -> int:
    """Run a server on a Unix socket, and the proxy in front of it on a bound TCP socket; return the
    exit status.
    """
    from smtrain.tools.serve.proxy import serve_in_front  # its packages come with the server

    process = subprocess.Popen(command, env=environment)
    previous_handler = signal.signal(signal.SIGTERM, lambda *_: process.terminate())
    try:
        if _is_ready(socket_path, process):
            listening.listen(128)
            ready()
            serve_in_front(listening, host, socket_path, process)
        return process.wait()
    except KeyboardInterrupt:
        return 0
    finally:
        signal.signal(signal.SIGTERM, previous_handler)
        _end(process)


def command_of(server: Server, model: FoundModel, folder: Path, socket_path: str) -> list[str]:
    """The command line of the server, which listens on a Unix socket."""
    if server == "transformers":
        return [
            sys.executable,
            "-m",
            "smtrain.tools.serve.unix_socket_server",
            socket_path,
            "serve",
            str(folder),
        ]
    at = ["--uds", socket_path, "--served-model-name", name_of(server, model, folder)]
    if not model.is_adapter:
        return [str(_program("vllm")), "serve", str(folder), *at]
    base = str(model.model_config.get("base_model_name_or_path") or "")
    if not base or base.startswith("s3://"):
        raise ConfigError(
            f"{model.name} names {base or 'no base model'}, which vLLM cannot load; download the"
            " base model and write its folder into base_model_name_or_path of adapter_config.json",
            code="config.wrong_value",
        )
    rank = max(8, int(model.model_config.get("r", 16)))
    lora = ["--enable-lora", "--max-lora-rank", str(rank), "--lora-modules", f"{at[-1]}={folder}"]
    return [str(_program("vllm")), "serve", base, *at[:-2], *lora]


def environment_of(server: Server) -> dict[str, str]:
    """Environment of the server, with telemetry off."""
    if server == "transformers":
        from huggingface_hub.constants import HF_HUB_CACHE

        # Without this folder its list of models, which most clients ask for first, is an error 500.
        with contextlib.suppress(OSError):
            Path(HF_HUB_CACHE).mkdir(parents=True, exist_ok=True)
    return {**os.environ, "HF_HUB_DISABLE_TELEMETRY": "1", "DO_NOT_TRACK": "1"}


def name_of(server: Server, model: FoundModel, folder: Path) -> str:
    """The name that a client sends as `model`: transformers' server knows a folder only by its
    path.
    """
    return str(folder) if server == "transformers" else Path(model.name.rstrip("/")).name


def _select_server(server: Server | None) -> Server:
    if server is not None and server not in get_args(Server):
        raise ConfigError(
            f"server: got {server!r}; {hint(str(server), get_args(Server))}",
            code="config.wrong_value",
        )
    available = servers()
    if server is None and available:
        return available[0]
    if server in available and server is not None:
        return server
    missing_server = server or "vllm, nor a server of transformers"
    remedy = "pip install vllm" if server == "vllm" else "pip install 'transformers[serving]'"
    raise ConfigError(
        f"this Python has no {missing_server}; `{remedy}` installs one", code="package.missing"
    )


def _program(name: str) -> str | None:
    """A program next to this Python, or else on the PATH."""
    sibling = Path(sys.executable).with_name(name)
    return str(sibling) if sibling.is_file() else shutil.which(name)


def _transformers() -> tuple[int, ...]:
    try:
        version = importlib.metadata.version("transformers")
    except importlib.metadata.PackageNotFoundError:
        return (0,)
    return tuple(int(part) for part in version.split(".")[:2] if part.isdigit())


def _bind(host: str, port: int) -> socket.socket:
    """A TCP socket with this address, not listening yet.

    Raises `JobError` if the address cannot be used.
    """
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound_socket = socket.socket(family, kind)
        try:
            bound_socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound_socket.bind(address)
        except OSError:
            bound_socket.close()
            raise
    except OSError as error:
        raise JobError(
            f"port {port} of {host} cannot be used ({error.strerror}); choose another with --port"
        ) from None
    return bound_socket


def _socket_folder() -> str:
    """The folder for the Unix socket's own, whose path must be short."""
    place = tempfile.gettempdir()
    return (
        place if len(os.fsencode(f"{place}/{_PREFIX}12345678/server")) <= _LONGEST_PATH else "/tmp"  # noqa: S108
    )


def _is_ready(
    socket_path: str, process: subprocess.Popen[bytes], pause: Callable[[float], None] = time.sleep
) -> bool:
    """Wait until the server answers; False if it ends before."""
    import httpx

    with httpx.Client(
        transport=httpx.HTTPTransport(uds=socket_path), timeout=5, trust_env=False
    ) as client:
        while process.poll() is None:
            try:
                client.get("http://model/health")
                return True  # of any status: older servers have no such page
            except httpx.HTTPError:
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
