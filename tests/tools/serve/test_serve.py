"""OpenAI's own client talks to `smtrain serve`, which ends with its caller and leaves nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from smtrain.core.errors import ConfigError, SmtrainError
from smtrain.tools.chat.resolve_model import FoundModel
from smtrain.tools.serve.local_server import command_of, environment_of, serve, servers
from tests.ports import free_port


@pytest.mark.slow
def test_openais_client_talks_to_a_trained_model(
    trained_inputs: dict[str, Path], tmp_path: Path
) -> None:
    openai = pytest.importorskip("openai")
    if "transformers" not in servers():
        pytest.skip("transformers' server needs fastapi and uvicorn")
    port, log = free_port(), tmp_path / "log"
    command = [
        sys.executable,
        "-c",
        "from smtrain.cli import main; main()",
        "serve",
        str(trained_inputs["model"]),
    ]
    own = {
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_CACHE": str(tmp_path / "no/cache"),
    }
    with log.open("wb") as out:
        process = subprocess.Popen(
            [*command, "--port", str(port), "--server", "transformers"],
            stdout=out,
            stderr=out,
            start_new_session=True,
            env={**os.environ, **own},
        )
    try:
        until = time.monotonic() + 300
        while "answers at" not in log.read_text():
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < until, log.read_text()
            time.sleep(0.2)
        with openai.OpenAI(
            base_url=f"http://127.0.0.1:{port}/v1", api_key="none", timeout=300
        ) as client:
            answer = client.completions.create(
                model=str(trained_inputs["model"]),
                prompt="the red fox",
                max_tokens=4,
                temperature=0,
            )
            assert answer.choices[0].text
            # transformers 5.24 lists the model it was started with; older ones list the hub's cache
            # only, empty here.
            assert [model.id for model in client.models.list()] in (
                [],
                [str(trained_inputs["model"])],
            )
            streamed = client.completions.create(
                model=str(trained_inputs["model"]),
                prompt="the red fox",
                max_tokens=4,
                temperature=0,
                stream=True,
            )
            assert (
                "".join(part.choices[0].text for part in streamed if part.choices)
                == answer.choices[0].text
            )
            with pytest.raises(openai.NotFoundError, match="below /v1/"):
                client.with_options(base_url=f"http://127.0.0.1:{port}").post(
                    "/load_model", cast_to=object, body={}
                )
        process.send_signal(signal.SIGTERM)
        process.wait(60)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def test_without_a_server_the_remedy_is_said(
    monkeypatch: pytest.MonkeyPatch, trained_inputs: dict[str, Path]
) -> None:
    with pytest.raises(ConfigError, match="known: vllm, transformers"):
        serve(str(trained_inputs["model"]), server="tgi")  # type: ignore[arg-type]
    if "vllm" not in servers():
        with pytest.raises(ConfigError, match="pip install vllm"):
            serve(str(trained_inputs["model"]), server="vllm")


def test_an_adapter_is_served_beside_its_base_by_vllm() -> None:
    description = {"base_model_name_or_path": "org/base", "r": 16}
    adapter = FoundModel("out/adapter", description, 1.0, True, Path("/m"))
    command = command_of("vllm", adapter, Path("/m"), "/private/server")
    assert command[1:5] == ["serve", "org/base", "--uds", "/private/server"]
    assert command[command.index("--lora-modules") + 1] == "adapter=/m"
    with pytest.raises(ConfigError, match="cannot load"):
        command_of(
            "vllm",
            FoundModel("a", {"base_model_name_or_path": "s3://b"}, 1.0, True, Path("/m")),
            Path("/m"),
            "s",
        )


def test_a_folder_that_is_no_model_is_said_before_a_package_that_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("smtrain.tools.serve.local_server.servers", list)
    with pytest.raises(SmtrainError, match=r"config\.json"):
        serve(str(tmp_path))


def test_transformers_server_finds_a_cache_to_list(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "no/cache"))
    environment_of("vllm")
    assert not (tmp_path / "no").exists()
    assert environment_of("transformers")["HF_HUB_DISABLE_TELEMETRY"] == "1"
    assert (tmp_path / "no/cache").is_dir()
