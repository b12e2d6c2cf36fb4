"""Every notebook runs headless: here with the tiny model, and for AWS as a dry run without
credentials or network.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from html import unescape
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from tests.client.sdk.test_golden import GOLDEN, pinned
from tests.client.sdk.wire import canonical

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
PREPARE, TRAIN, EXPORT, WHOLE = (path.stem for path in NOTEBOOKS)
# The tiny model's run, short enough for a test.
SHORT = {"steps": 6, "warmup_steps": 2, "save_interval": 3, "max_new_tokens": 8}
Execute = Callable[[str], Any]


def shorten(config: str) -> str:
    """The text of a config, whose run is short."""
    for key, short in SHORT.items():
        config, count = re.subn(rf"^  {key}: \d+$", f"  {key}: {short}", config, flags=re.MULTILINE)
        assert count == 1, key
    return config


def code_cells(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def printed(notebook: Any) -> str:
    """Text that all cells wrote to stdout."""
    outputs = [output for cell in code_cells(notebook) for output in cell.outputs]
    return "".join(output.text for output in outputs if output.get("name") == "stdout")


def shown(notebook: Any, kind: str) -> list[str]:
    """Displayed data of this MIME type."""
    outputs = [output for cell in code_cells(notebook) for output in cell.outputs]
    return [output.data[kind] for output in outputs if kind in output.get("data", {})]


def requests(notebook: Any) -> list[Any]:
    """The requests in the cells, each displayed as a line that opens."""
    opened = [html for html in shown(notebook, "text/html") if html.startswith("<details>")]
    return [
        json.loads(unescape(re.findall(r"<pre[^>]*>(.*)</pre>", html, re.DOTALL)[0]))
        for html in opened
    ]


@pytest.fixture(scope="module")
def executed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str, dict[str, str]], Any]:
    """Runs a notebook for a target in a copy of the folders, with a short run of the tiny model."""
    root = tmp_path_factory.mktemp("checkout")
    shutil.copytree(ROOT / "notebooks", root / "notebooks")
    shutil.copytree(ROOT / "examples", root / "examples")
    for config in ("tiny-llama", "here"):
        file = root / f"examples/{config}.yaml"
        file.write_text(shorten(file.read_text("utf-8")), "utf-8")

    def execute(name: str, target: str, environment: dict[str, str]) -> Any:
        notebook: Any = nbformat.read(root / f"notebooks/{name}.ipynb", as_version=4)
        first = code_cells(notebook)[0]
        first.source = re.sub(
            r'^TARGET = "\w+"', f'TARGET = "{target}"', first.source, flags=re.MULTILINE
        )
        folder = {"metadata": {"path": str(root / "notebooks")}}
        NotebookClient(notebook, timeout=300, startup_timeout=300, resources=folder).execute(
            env=environment
        )
        return notebook

    return execute


@pytest.fixture(scope="module")
def here(local_home: Path, executed: Any) -> Execute:
    """Runs a notebook on the local control plane, after the previous ones, each once."""
    done: dict[str, Any] = {}
    environment = {key: value for key, value in os.environ.items() if not key.startswith("AWS_")}

    def run(name: str) -> Any:
        for path in NOTEBOOKS:
            if path.stem not in done:
                done[path.stem] = executed(path.stem, "local", environment)
            if path.stem == name:
                return done[name]
        raise AssertionError(name)

    return run


@pytest.fixture(scope="module")
def on_aws(tmp_path_factory: pytest.TempPathFactory, executed: Any) -> Execute:
    """Runs a notebook for AWS without a login and without a network."""
    home = tmp_path_factory.mktemp("nobody")
    environment = {
        **{
            key: value
            for key, value in os.environ.items()
            if not key.startswith(("AWS_", "SAGEMAKER_"))
        },
        "HOME": str(home),
        "SMTRAIN_HOME": str(home / "smtrain"),
        "AWS_EC2_METADATA_DISABLED": "true",
        **dict.fromkeys(
            ("HTTPS_PROXY", "HTTP_PROXY", "https_proxy", "http_proxy"), "http://127.0.0.1:9"
        ),
    }

    def run(name: str) -> Any:
        notebook = executed(name, "aws", environment)
        assert not list(home.glob("smtrain/*")), "something was started"
        return notebook

    return run


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_spends_nothing_by_default(path: Path) -> None:
    notebook: Any = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert notebook.metadata.kernelspec.name == "python3"
    first = code_cells(notebook)[0].source
    assert re.search(r'^TARGET = "local"', first, re.MULTILINE)
    assert re.search(r"^SPEND = False\b", first, re.MULTILINE)
    assert not re.search(r"hf_\w{20}|AKIA\w{16}", path.read_text("utf-8"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_stored_with_what_one_run_of_it_showed(path: Path) -> None:
    """`scripts/notebooks` runs and stores them."""
    notebook: Any = nbformat.read(path, as_version=4)
    cells = code_cells(notebook)
    assert [cell.execution_count for cell in cells] == [*range(1, len(cells) + 1)], (
        "from the first cell to the last"
    )
    outputs = [output for cell in cells for output in cell.outputs]
    assert {output.output_type for output in outputs} <= {
        "stream",
        "display_data",
        "execute_result",
    }, "no error"
    assert "stderr" not in {output.get("name") for output in outputs}
    assert "widget-view" not in path.read_text("utf-8"), "a progress bar of another library"
    assert shown(notebook, "text/html"), "tables and panels"
    assert printed(notebook).strip()
    stored = path.read_text("utf-8")
    assert not re.search(r"Traceback|/tmp/|/root/|/home/|\\u001b", stored)
    assert "<svg" not in "".join(shown(notebook, "text/html")), (
        "an untrusted notebook shows only the text"
    )
    assert len(stored) < 300_000
    assert all(cell.metadata == {} for cell in cells), "no timestamps"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_switches_are_seen_on_a_narrow_screen(path: Path) -> None:
    """At 900 pixels a cell of JupyterLab next to its file list shows 57 characters without
    scrolling.
    """
    cells = code_cells(nbformat.read(path, as_version=4))
    assert max(map(len, cells[0].source.splitlines())) <= 57
    assert max(len(line) for cell in cells for line in cell.source.splitlines()) <= 79


@pytest.mark.full
@pytest.mark.slow
def test_text_is_prepared_and_weights_are_converted(here: Execute) -> None:
    done = here(PREPARE)
    assert [request["TrainingJobName"].rsplit("-", 1)[0] for request in requests(done)] == [
        "tiny-llama-prepare",
        "tiny-llama-convert",
    ]
    assert printed(done).count("cost: nothing") == 2
    assert any("<img" in html for html in shown(done, "text/html")), "the plan has a picture"


@pytest.mark.full
@pytest.mark.slow
def test_training_is_followed_drawn_and_paid_for(here: Execute) -> None:
    done = here(TRAIN)
    panels = [html for html in shown(done, "text/html") if "6 of 6" in html]
    assert panels, "the live panel stays at the end"
    assert "Completed" in panels[0]
    assert shown(done, "image/png"), "job.plot()"
    assert len(re.findall(r"/checkpoints/tiny-llama-train-\w+/step_\d+/", printed(done))) == 2


@pytest.mark.full
@pytest.mark.slow
def test_the_exported_model_is_ordinary(here: Execute) -> None:
    done = here(EXPORT)
    output = printed(done)
    assert "9.4 M parameters" in output
    assert output.count("def __init__(self") >= 2, "by the generate job, and by transformers here"


@pytest.mark.full
@pytest.mark.slow
def test_the_whole_run_with_one_call(here: Execute) -> None:
    done = here(WHOLE)
    assert len(requests(done)) == 5
    for stage in ("prepare", "convert", "train", "export", "generate"):
        assert re.search(rf"^{stage} +[\d.]+ s\n  s3://", printed(done), re.MULTILINE)
    assert "[5/5] generate: done in " in printed(done)
    assert "$" not in printed(done), "a run at home costs nothing"


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", [PREPARE, EXPORT, WHOLE])
def test_for_aws_the_full_size_is_shown_and_nothing_is_sent(on_aws: Execute, name: str) -> None:
    done = on_aws(name)
    assert all(request["TrainingJobName"].startswith("llama-2-70b-") for request in requests(done))
    assert "could not be checked" in "".join(shown(done, "text/html"))


def test_the_70b_notebook_shows_the_golden_request(on_aws: Execute) -> None:
    done = on_aws(TRAIN)
    assert pinned(canonical(requests(done)[0])).encode() == GOLDEN.read_bytes()
    table = shown(done, "text/html")[0]
    assert all(f"<th>{count}</th>" in table for count in (8, 16, 32))
