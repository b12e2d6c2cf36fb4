"""`scripts/test --changed`: which tests a change selects, on a small checkout of the same
layout.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests import affected, durations

FILES = {
    "smtrain/__init__.py": "",
    "smtrain/client/planner/__init__.py": "",
    "smtrain/client/planner/memory.py": (
        "PAGE = 4096\n\ndef peak():\n    return PAGE\n\ndef disk():\n    return 1\n"
    ),
    "smtrain/client/planner/plan.py": (
        "from smtrain.client.planner import memory\n\ndef plan():\n    return memory.peak()\n"
    ),
    "smtrain/plane/server/serve.py": (
        "from smtrain.client.planner.memory import disk\n\ndef main():\n    disk()\n"
    ),
    "smtrain/client/backends/sagemaker/server.py": (
        "COMMAND = ['python', '-m', 'smtrain.plane.server.serve']\n\n"
        "def start():\n    return COMMAND\n"
    ),
    "smtrain/cli/__init__.py": "COMMANDS = {}\n\ndef main():\n    pass\n",
    "smtrain/cli/plan.py": (
        "def app():\n    from smtrain.client.planner.plan import plan\n    plan()\n"
    ),
    "smtrain/cli/logs.py": (
        "import typer\n\napp = typer.Typer()\n\n@app.command()\ndef logs():\n    follow()\n\n"
        "def follow():\n    pass\n"
    ),
    "smtrain/client/launch/submit.py": "def create():\n    pass\n",
    "smtrain/core/facts/prices.toml": "",
    "smtrain/core/facts/read.py": (
        "def prices():\n    return load('prices')\n\ndef load(name):\n    return name\n"
    ),
    "entrypoints/launch.py": "def main():\n    pass\n",
    "entrypoints/train.py": "from smtrain.worker.engine import step\n\ndef stage():\n    step()\n",
    "smtrain/worker/engine/__init__.py": "def step():\n    pass\n",
    "docs/lora.md": "# LoRA\n\n```console\n$ smtrain plan\n```\n",
    "docs/slurm.md": "# Slurm\n",
    "tests/__init__.py": "",
    "tests/conftest.py": (
        "import pytest\nfrom smtrain.client.backends.sagemaker.server import start\n\n"
        "@pytest.fixture\ndef plane():\n    return start()\n"
    ),
    "tests/client/planner/test_memory.py": (
        "from smtrain.client.planner.memory import disk, peak\n\n"
        "def test_peak():\n    peak()\n\n"
        "def test_disk():\n    disk()\n"
    ),
    "tests/client/planner/test_plan.py": (
        "import smtrain.client.planner.plan as p\n\ndef test_plan():\n    p.plan()\n"
    ),
    "tests/plane/test_training_api.py": (
        "def test_api(plane):\n    pass\n\ndef test_pure():\n    pass\n"
    ),
    "tests/cli/test_cli.py": (
        "from smtrain.cli import main\n\ndef test_plan():\n    main(['plan'])\n\n"
        "def test_logs():\n    main(['logs'])\n"
    ),
    "tests/client/launch/test_run.py": (
        "from smtrain.client.launch.submit import create\n\ndef test_run():\n    create()\n"
    ),
    "tests/core/facts/test_prices.py": (
        "from smtrain.core.facts.read import prices\n\ndef test_prices():\n    prices()\n"
    ),
    "tests/docs/test_pages.py": (
        "def test_blocks_are_of_kinds_that_are_run_or_shown():\n    assert 'docs'\n\n"
        "def test_a_page_does_what_it_says():\n    assert 'docs'\n"
    ),
    "tests/docs/test_site.py": (
        "def test_site():\n    assert 'docs'\n\ndef test_other():\n    pass\n"
    ),
}

Select = Callable[..., list[str]]


@pytest.fixture
def select(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Select]:
    """Change files of the checkout by (path, old, new), and give the arguments for pytest."""
    for path, text in FILES.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    identity = ("-c", "user.name=a", "-c", "user.email=a@b")
    for words in (["init", "-q"], ["add", "-A"], [*identity, "commit", "-qm", "first"]):
        subprocess.run(["git", *words], cwd=tmp_path, check=True)
    commands = {"plan": ("smtrain.cli.plan", ""), "logs": ("smtrain.cli.logs", "")}
    monkeypatch.setattr(affected, "ROOT", tmp_path)
    monkeypatch.setattr(durations, "KEPT", tmp_path / "durations.json")
    monkeypatch.setattr(affected, "COMMANDS", commands)

    def selected(*edits: tuple[str, str, str]) -> list[str]:
        for path, old, new in edits:
            text = (tmp_path / path).read_text()
            assert old in text
            (tmp_path / path).write_text(text.replace(old, new))
        forget()
        return affected.affected(affected.changed_since("HEAD"))

    yield selected
    forget()


def forget() -> None:
    affected.modules.cache_clear()
    affected.autouse.cache_clear()


def test_the_tests_of_a_changed_function_and_of_its_callers_the_nearest_first(
    select: Select,
) -> None:
    selected = select(("smtrain/client/planner/memory.py", "return PAGE", "return PAGE * 2"))
    assert selected == [
        "tests/client/planner/test_memory.py::test_peak",
        "tests/client/planner/test_plan.py",
        "tests/cli/test_cli.py::test_plan",
    ]


def test_a_constant_affects_what_uses_it(select: Select) -> None:
    assert "tests/client/planner/test_plan.py" in select(
        ("smtrain/client/planner/memory.py", "4096", "8192")
    )


def test_a_module_that_runs_as_a_process_affects_those_that_start_it(select: Select) -> None:
    selected = select(("smtrain/client/planner/memory.py", "return 1", "return 2"))
    assert selected == [
        "tests/client/planner/test_memory.py::test_disk",
        "tests/plane/test_training_api.py::test_api",
    ]


def test_a_stages_script_affects_those_that_create_jobs(select: Select) -> None:
    assert select(("smtrain/worker/engine/__init__.py", "pass", "return 1")) == [
        "tests/client/launch/test_run.py"
    ]


def test_a_command_affects_the_tests_that_type_it(select: Select) -> None:
    assert select(("smtrain/cli/logs.py", "    pass", "    return")) == [
        "tests/cli/test_cli.py::test_logs"
    ]


def test_comments_and_layout_affect_nothing(select: Select) -> None:
    assert (
        select(
            ("smtrain/client/planner/memory.py", "    return PAGE", "    # why\n    return (PAGE)")
        )
        == []
    )


def test_a_changed_import_affects_what_uses_its_name(select: Select) -> None:
    edit = ("smtrain/plane/server/serve.py", "memory import disk", "memory import peak as disk")
    assert select(edit) == ["tests/plane/test_training_api.py::test_api"]


def test_a_page_runs_its_own_cases_only(select: Select) -> None:
    pages = "tests/docs/test_pages.py::test_blocks_are_of_kinds_that_are_run_or_shown[{0}]"
    runs = "tests/docs/test_pages.py::test_a_page_does_what_it_says[{0}]"
    assert select(("docs/slurm.md", "Slurm", "SLURM")) == [
        pages.format("slurm"),
        "tests/docs/test_site.py::test_site",
    ]
    selected = select(("docs/slurm.md", "SLURM", "Slurm"), ("docs/lora.md", "LoRA", "LORA"))
    assert selected == [
        pages.format("lora"),
        runs.format("lora"),
        "tests/docs/test_site.py::test_site",
    ]


def test_facts_affect_what_reads_them(select: Select) -> None:
    assert select(("smtrain/core/facts/prices.toml", "", "a = 1\n")) == [
        "tests/core/facts/test_prices.py"
    ]


def test_a_new_test_runs_and_a_change_of_the_environment_runs_all(select: Select) -> None:
    (affected.ROOT / "tests/client/planner/test_new.py").write_text("def test_new():\n    pass\n")
    assert select() == ["tests/client/planner/test_new.py"]
    (affected.ROOT / "pyproject.toml").write_text("")
    assert select() == ["tests"]


def test_a_file_that_may_skip_itself_is_named_as_a_whole(select: Select) -> None:
    path = affected.ROOT / "tests/client/planner/test_memory.py"
    path.write_text(f"import pytest\npytest.importorskip('nothing')\n{path.read_text()}")
    subprocess.run(
        ["git", "-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qam", "x"],
        cwd=affected.ROOT,
        check=True,
    )
    assert (
        select(("smtrain/client/planner/memory.py", "return 1", "return 2"))[0]
        == "tests/client/planner/test_memory.py"
    )


def test_a_wrong_base_or_file_is_one_sentence(
    select: Select, capsys: pytest.CaptureFixture[str]
) -> None:
    assert affected.main(["nowhere"]) == 2
    assert "'nowhere' is no commit of this checkout; give" in capsys.readouterr().err
    (affected.ROOT / "smtrain/client/planner/plan.py").write_text("def (\n")
    assert affected.main(["HEAD"]) == 2
    assert "smtrain/client/planner/plan.py:1 is not Python" in capsys.readouterr().err


def test_a_removed_function_affects_what_still_names_it(select: Select) -> None:
    selected = select(("smtrain/client/planner/memory.py", "def peak", "def highest"))
    assert "tests/client/planner/test_memory.py::test_peak" in selected
    assert "tests/client/planner/test_memory.py::test_disk" not in selected
