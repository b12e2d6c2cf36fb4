"""The same model whatever transformers is installed, and whichever wrote its config.json."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from smtrain.worker.checkpoint.export import BaseModel, export
from tests import warm
from tests.core.model import generations as g

REPOSITORY = Path(__file__).parents[3]
OTHERS = {
    "4.56": "tf456",
    "4.57": "tf457",
    "5.0": "tf500",
}  # folders of .venv that scripts/test makes


pytestmark = pytest.mark.full  # the gate has test_families.py


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders that the installed transformers wrote, and their exports."""
    from tokenizers import Tokenizer, models
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("models")
    letters = {letter: i for i, letter in enumerate("abcdefghijklmnopqrstuvwxyz")}
    kinds = Tokenizer(models.BPE(letters | {"<|end|>": 62, "<|mark|>": 63}, []))
    tokenizer: Any = PreTrainedTokenizerFast
    for family, rope in (("llama", "llama3"), ("gpt_neox", "partial"), ("qwen2", "yarn")):
        saved = folder / f"saved-{family}"
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**g.spelled(family, rope, 5)))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(0, 0.3)
        model.save_pretrained(saved)
        tokenizer(
            tokenizer_object=kinds, eos_token="<|end|>", additional_special_tokens=["<|mark|>"]
        ).save_pretrained(saved)
        export(saved, BaseModel(saved), folder / f"exported-{family}")
    return folder


def _run_here(models: Path, out: Path) -> dict[str, Any]:
    """With the installed transformers, which a warm Python has imported."""
    script = out.with_suffix(".py")
    script.write_text(
        f"import sys; from pathlib import Path; sys.path.insert(0, {str(REPOSITORY)!r})\n"
        "from tests.core.model.generations import main\nmain(*map(Path, sys.argv[1:]))\n"
    )
    done = warm.run(
        [script, out, models],
        {**os.environ, "OMP_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "error"},
    )
    assert done.returncode == 0, done.stderr
    return torch.load(out)


def _run(models: Path, out: Path, packages: str | None) -> dict[str, Any]:
    if packages is None:
        return _run_here(models, out)
    path = os.pathsep.join(map(str, (Path(sys.prefix) / packages, REPOSITORY)))
    environment = {
        **os.environ,
        "PYTHONPATH": path,
        "OMP_NUM_THREADS": "1",
        "TRANSFORMERS_VERBOSITY": "error",
    }
    command = [sys.executable, "-m", "tests.core.model.generations", str(out), str(models)]
    done = subprocess.run(command, env=environment, cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return torch.load(out)


@pytest.fixture(scope="module")
def installed(models: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return _run(models, tmp_path_factory.mktemp("installed") / "found.pt", None)


@pytest.fixture(scope="module", params=list(OTHERS))
def other(
    request: pytest.FixtureRequest, models: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    folder = OTHERS[request.param]
    if not (Path(sys.prefix) / folder).is_dir():
        pytest.skip(
            f"transformers {request.param} is not in {folder} of this environment; scripts/test"
            " --transformers"
        )
    results = _run(models, tmp_path_factory.mktemp(folder) / "found.pt", folder)
    assert results["version"].startswith(request.param)
    return results


def _distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).abs().max())


def _check_logits(results: dict[str, Any], reference: dict[str, Any]) -> None:
    # transformers 5.0 overlooks partial_rotary_factor in its own files
    own = () if results["version"].startswith("5.0.") else ("own",)
    far = {
        f"{family} {rope} {how}": distance
        for family, rope in g.CASES
        for how in (*own, "ours-4", "ours-5", "exported-4", "exported-5")
        if (
            distance := _distance(
                results[f"{family} {rope} {how}"], reference[f"{family} {rope} own"]
            )
        )
        > 1e-6
    }
    assert not far


def test_configs_of_both_generations_give_the_logits_of_transformers_own_reading(
    installed: dict[str, Any],
) -> None:
    _check_logits(installed, installed)


def test_rope_types_differ_so_that_a_lost_setting_shows(installed: dict[str, Any]) -> None:
    for family, rope in g.CASES:
        if rope != "default":
            name = f"{family} {rope} own"
            assert _distance(installed[name], installed[f"{family} default own"]) > 1e-3, name


def test_another_generation_gives_the_logits_of_the_installed_one(
    installed: dict[str, Any], other: dict[str, Any]
) -> None:
    _check_logits(other, installed)


def test_losses_and_gradient_norms_are_equal_across_generations(
    installed: dict[str, Any], other: dict[str, Any]
) -> None:
    names = [name for name in installed if "losses" in name]
    assert len(names) == 2 * 11
    for name in names:
        reference = [n for step in installed[name] for n in step]
        assert [n for step in other[name] for n in step] == pytest.approx(reference, rel=1e-6), name


def test_saved_and_exported_folders_load_in_another_generation(
    installed: dict[str, Any], other: dict[str, Any]
) -> None:
    for family in ("llama", "gpt_neox", "qwen2"):
        assert _distance(other[f"{family} logits"], installed[f"{family} logits"]) < 1e-6
        for results in (installed, other):
            ids, special = results[f"{family} tokens"]
            assert ids == [0, 63, 1]
            assert {"<|end|>", "<|mark|>"} <= {*special}
        for kind in ("saved", "exported"):
            assert other[f"{family} {kind} text"] == installed[f"{family} exported text"]
