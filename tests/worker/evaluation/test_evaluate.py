"""An evaluation is what lm-evaluation-harness gives by hand on the same files, and its verdict on
two models.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from smtrain.cli.dispatch import call
from smtrain.core.benchmarks import benchmarks_in
from smtrain.core.config import JobConfig
from smtrain.core.errors import CheckpointError, ConfigError, DataError
from smtrain.stages import keys_of, stage_named
from smtrain.worker.data.read.ignored_fields import IgnoredText
from smtrain.worker.evaluation import report
from smtrain.worker.evaluation.evaluate import evaluate, format_result, save
from smtrain.worker.evaluation.harness import EvaluationRequest, Tasks, can_reach_hub
from smtrain.worker.evaluation.libraries import HarnessProgress, hub_answers
from smtrain.worker.evaluation.offline import write_tasks
from smtrain.worker.generation.load import load
from tests import warm
from tests.core.model.test_generate import make
from tests.extras import need
from tests.worker.evaluation.benchmark_files import (
    FORMS,
    agieval_of_authors,
    bbh_of_hub,
    boolq_of_google,
    ceval_of_hub,
    humaneval_of_hub,
)
from tests.worker.evaluation.mmlu_files import SUBJECTS, as_csv, as_parquet
from tests.worker.train.test_shell import REPO, Shell

need("lm_eval")


def quiet(_: str) -> None:
    pass


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, trained_inputs: dict[str, Path]) -> Path:
    """A tiny model with positions for a few examples before a question."""
    folder = tmp_path_factory.mktemp("models") / "after"
    shutil.copytree(trained_inputs["model"], folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 2048}))
    return folder


@pytest.fixture(scope="module")
def base(model: Path) -> Path:
    """Another model of the same shape."""
    import torch
    from safetensors.torch import load_file, save_file

    folder = model.parent / "before"
    shutil.copytree(model, folder)
    weights = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(5)
    changed = {
        n: w + 0.2 * torch.randn(w.shape, generator=generator, dtype=w.dtype)
        for n, w in weights.items()
    }
    save_file(changed, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def by_library(
    model: Path, tasks: Path, names: str, out: Path, shots: int | None = 3
) -> dict[str, Any]:
    """The harness's own function, without the index of all tasks that it brings along."""
    import datasets
    import lm_eval
    from lm_eval.tasks import TaskManager

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", out / "cache")
        results = lm_eval.simple_evaluate(
            "hf",
            f"pretrained={model}",
            names.split(","),
            num_fewshot=shots,
            batch_size=8,
            device="cpu",
            task_manager=TaskManager(include_path=str(tasks), include_defaults=False),
            confirm_run_unsafe_code=True,
        )
    scores: dict[str, Any] = results["results"]
    return scores


def by_hand(model: Path, tasks: Path, names: str, out: Path) -> dict[str, Any]:
    """The harness's own command."""
    environment = {
        **os.environ,
        "HF_DATASETS_OFFLINE": "1",
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_CACHE": str(out / "cache"),
    }
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "lm_eval",
            "run",
            "--model",
            "hf",
            "--model_args",
            f"pretrained={model}",
            "--tasks",
            names,
            "--include_path",
            str(tasks),
            "--batch_size",
            "8",
            "--device",
            "cpu",
            "--output_path",
            str(out),
            "--num_fewshot",
            "3",
        ],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (written,) = out.rglob("results_*.json")
    scores: dict[str, Any] = json.loads(written.read_text())["results"]
    return scores


def theirs(folder: Path, parquet: Path) -> Path:
    """The harness's own MMLU tasks, whose data set is the files'; nothing of ours is in them."""
    import lm_eval

    template = Path(lm_eval.__file__).parent / "tasks/mmlu/default/_default_template_yaml"
    folder.mkdir()
    for subject in SUBJECTS:
        files = {
            split: str(parquet / subject / f"{split}-00000-of-00001.parquet")
            for split in ("test", "dev")
        }
        task = {
            **yaml.safe_load(template.read_text()),
            "task": f"by_hand_{subject}",
            "dataset_path": "parquet",
            "dataset_kwargs": {"data_files": files},
            "description": (
                "The following are multiple choice questions (with answers) about "
                f"{subject.replace('_', ' ')}.\n\n"
            ),
        }
        (folder / f"{subject}.yaml").write_text(yaml.safe_dump(task))
    return folder


@pytest.mark.parametrize("by", [by_library, by_hand], ids=["library", "command"])
@pytest.mark.full
def test_mmlus_accuracy_is_the_harness_own_to_the_last_digit(
    model: Path, tmp_path: Path, by: Callable[..., dict[str, Any]]
) -> None:
    parquet = as_parquet(tmp_path / "mmlu")
    known = by(
        model,
        theirs(tmp_path / "tasks", parquet),
        "by_hand_anatomy,by_hand_college_physics",
        tmp_path / "out",
    )
    made = evaluate(model, None, EvaluationRequest(("mmlu",), parquet, num_fewshot=3), quiet)
    rows = {row["task"]: row for row in made["results"]}
    for subject, count in SUBJECTS.items():
        own, row = known[f"by_hand_{subject}"], rows[f"mmlu_{subject}"]
        assert (row["after"]["value"], row["after"]["stderr"]) == (
            own["acc,none"],
            own["acc_stderr,none"],
        )
        assert row["n"] == count
    whole = sum(rows[f"mmlu_{s}"]["after"]["value"] * n for s, n in SUBJECTS.items()) / sum(
        SUBJECTS.values()
    )
    assert rows["mmlu"]["after"]["value"] == pytest.approx(whole, rel=1e-12)
    assert rows["mmlu"]["n"] == sum(SUBJECTS.values())
    prompt = made["prompts"]["mmlu_anatomy"]["prompt"]
    assert prompt.startswith(
        "The following are multiple choice questions (with answers) about anatomy.\n\nwhat is dev"
    )
    assert prompt.count("Answer:") == 4


class PlainCodeEval:
    """The metric `code_eval` as the harness calls it for one problem, by a plain process; ours has
    no part in it.
    """

    def compute(
        self, references: list[str], predictions: list[list[str]], **_: Any
    ) -> tuple[dict[str, float], None]:
        ((program,),), (test,) = predictions, references
        text = f"{program}\n{test}".encode(errors="replace")
        done = subprocess.run([sys.executable, "-"], input=text, capture_output=True, check=False)
        return {"pass@1": float(done.returncode == 0)}, None


DIRECT: dict[str, tuple[str, dict[str, Any]]] = {
    "super_glue/boolq/default.yaml": (
        "parquet",
        {
            "train": "boolq_of_hub/boolq/train-00000-of-00001.parquet",
            "validation": "boolq_of_hub/boolq/validation-00000-of-00001.parquet",
        },
    ),
    "bbh/cot_fewshot/boolean_expressions.yaml": (
        "json",
        {"test": "bbh_of_authors/bbh/boolean_expressions.json"},
    ),
    "agieval/aqua-rat.yaml": (
        "parquet",
        {"test": "agieval_of_hub/agieval-aqua-rat/data/test-00000-of-00001.parquet"},
    ),
    "agieval/math.yaml": (
        "parquet",
        {"test": "agieval_of_hub/agieval-math/data/test-00000-of-00001.parquet"},
    ),
    "ceval/ceval-valid_logic.yaml": (
        "csv",
        {
            "dev": "ceval_of_authors/dev/logic_dev.csv",
            "val": "ceval_of_authors/val/logic_val.csv",
        },
    ),
    "humaneval/humaneval.yaml": ("json", {"test": "humaneval_of_authors/HumanEval.jsonl.gz"}),
}
"""The harness's own tasks over the files by its own reader, in forms that it can read."""
READ_HERE = (boolq_of_google, bbh_of_hub, agieval_of_authors, ceval_of_hub, humaneval_of_hub)
"""The same questions in other forms."""


def directly(model: Path, files: Path, names: str, out: Path, shots: int | None) -> dict[str, Any]:
    """The harness's own function and tasks on the files; nothing of smtrain is in it."""
    import evaluate as metrics
    import lm_eval

    (out / "tasks").mkdir(parents=True)
    for at, (name, (reader, paths)) in enumerate(DIRECT.items()):
        data: dict[str, Any] = {
            "data_files": {split: str(files / path) for split, path in paths.items()}
        }
        data |= {"field": "examples"} if "bbh" in name else {}
        own = Path(lm_eval.__file__).with_name("tasks") / name
        task = {
            "include": str(own),
            "dataset_path": reader,
            "dataset_name": None,
            "dataset_kwargs": data,
        }
        (out / f"tasks/{at}.yaml").write_text(yaml.safe_dump(task))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(metrics, "load", lambda _: PlainCodeEval())
        return by_library(model, out / "tasks", names, out, shots)


WITH_EXAMPLES = ("boolq", "ceval-valid_logic")
GENERATED = ("bbh_cot_fewshot_boolean_expressions", "agieval_math", "humaneval")


@pytest.fixture(scope="module")
def silent(model: Path) -> Path:
    """A model that ends every text at once: all its logits are equal, and the first token is the
    end.
    """
    from safetensors.torch import load_file, save_file

    folder = model.parent / "silent"
    shutil.copytree(model, folder)
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"].zero_()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    for name in ("config.json", "generation_config.json"):
        described = json.loads((folder / name).read_text()) if (folder / name).exists() else {}
        (folder / name).write_text(json.dumps({**described, "eos_token_id": 0}))
    return folder


@pytest.mark.parametrize(
    ("who", "names", "shots"),
    [
        ("model", WITH_EXAMPLES, 2),
        ("silent", ("agieval_aqua_rat", *GENERATED), None),
        pytest.param("model", ("agieval_aqua_rat", *WITH_EXAMPLES), None, marks=pytest.mark.full),
        pytest.param("model", GENERATED, None, marks=pytest.mark.full),
    ],
)
def test_each_benchmark_is_scored_as_by_the_harness_directly(
    model: Path, silent: Path, tmp_path: Path, who: str, names: tuple[str, ...], shots: int | None
) -> None:
    files, data = tmp_path / "files", tmp_path / "data"
    for form in (form for forms in FORMS.values() for form in forms):
        form(files / form.__name__)
    for form in READ_HERE:
        shutil.copytree(files / form.__name__, data, dirs_exist_ok=True)
    folder = {"model": model, "silent": silent}[who]
    known = directly(folder, files, ",".join(names), tmp_path / "out", shots)
    made = evaluate(
        folder,
        None,
        EvaluationRequest(names, data, shots, run_generated_code="humaneval" in names),
        quiet,
    )
    ours: dict[str, dict[str, Any]] = {}
    for row in made["results"]:
        ours.setdefault(row["task"], {})[f"{row['metric']},{row['filter']}"] = row["after"]["value"]
    assert ours == {
        task: {key: value for key, value in numbers.items() if "," in key and "_stderr" not in key}
        for task, numbers in known.items()
    }
    if who == "silent":  # some of each are right
        assert ours["bbh_cot_fewshot_boolean_expressions"] == {"exact_match,get-answer": 0.5}
        assert ours["agieval_math"] == {"acc,none": pytest.approx(1 / 3)}
        assert ours["humaneval"] == {"pass@1,create_test": 0.5}
        assert report.main_rows(made)["humaneval"]["metric"] == "pass@1"
    if shots:
        assert made["prompts"]["boolq"]["prompt"].count("Question:") == 1 + shots
        assert made["prompts"]["ceval-valid_logic"]["prompt"].count("答案：") == 1 + shots


def test_csv_folders_and_parquet_folders_are_the_same_questions(tmp_path: Path) -> None:
    made = {}
    for name, folder in (
        ("parquet", as_parquet(tmp_path / "parquet")),
        ("csv", as_csv(tmp_path / "csv")),
        ("header", as_csv(tmp_path / "header", header=True)),
        ("nested", as_csv(tmp_path / "nested/data").parent),
    ):
        names = write_tasks(folder, ("mmlu",), tmp_path / f"work-{name}", IgnoredText())
        assert {"mmlu", "mmlu_stem", "mmlu_anatomy", "mmlu_college_physics"} <= set(names)
        out = tmp_path / f"work-{name}/mmlu"
        made[name] = {path.name: path.read_text() for path in sorted(out.glob("*.jsonl"))}
        assert sorted(benchmarks_in(folder)["mmlu"]) == sorted(SUBJECTS)
    assert made["parquet"] == made["csv"] == made["header"] == made["nested"]
    assert len(made["csv"]["anatomy_test.jsonl"].splitlines()) == 12


def test_a_tokenizer_that_draws_or_has_more_ids_than_the_model(
    model: Path, own_task: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(model, folder)
    about = json.loads((folder / "tokenizer.json").read_text())
    about["model"]["dropout"] = 0.5
    (folder / "tokenizer.json").write_text(json.dumps(about))
    tokenizer = load(folder).tokenizer
    assert (
        len({tuple(tokenizer("what is the answer to this question").input_ids) for _ in range(10)})
        == 1
    )
    about["added_tokens"].append({**about["added_tokens"][0], "id": 50_256, "content": "<more>"})
    (folder / "tokenizer.json").write_text(json.dumps(about))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "pad_token": "<more>"}))
    fine = evaluate(folder, None, EvaluationRequest(("reds",), own_task), quiet)["results"]
    assert fine == evaluate(model, None, EvaluationRequest(("reds",), own_task), quiet)["results"]
    other = shutil.copytree(own_task, tmp_path / "task")
    (other / "questions.jsonl").write_text(json.dumps({"q": "is <more> red?", "a": 0}) + "\n")
    with pytest.raises(
        CheckpointError, match=r"the token .<more>. has the id \d+, and the model has the ids 0 to"
    ):
        evaluate(folder, None, EvaluationRequest(("reds",), other), quiet)


def test_what_the_files_of_mmlu_hold_and_no_task_has_is_counted(tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    folder = as_parquet(tmp_path / "mmlu")
    unread = IgnoredText()
    write_tasks(folder, ("mmlu",), tmp_path / "plain", unread)
    assert unread == {}
    path = folder / "anatomy/test-00000-of-00001.parquet"
    table = pq.read_table(path)
    pq.write_table(table.append_column("why", [["because"] * len(table)]), path)
    (folder / "anatomy/validation-00000-of-00001.parquet").write_bytes(b"not read")
    write_tasks(folder, ("mmlu_anatomy",), tmp_path / "more", unread)
    assert unread == {"why": 12, "files of other splits": 1}


@pytest.fixture(scope="module")
def own_task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A task of one's own, its files named relative to it."""
    folder = tmp_path_factory.mktemp("own")
    rows = [{"q": f"is {i} red?", "a": i % 2} for i in range(40)]
    (folder / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task: dict[str, Any] = {
        "task": "reds",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": "questions.jsonl"}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{q}}",
        "doc_to_target": "a",
        "doc_to_choice": ["no", "yes"],
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    }
    (folder / "reds.yaml").write_text(yaml.safe_dump(task))
    both = [{**task["metric_list"][0], "metric": name} for name in ("acc_norm", "acc")]
    (folder / "by_length.yaml").write_text(
        yaml.safe_dump({**task, "task": "by_length", "metric_list": both})
    )
    return folder


def test_two_models_are_paired_on_the_same_questions(
    model: Path, base: Path, own_task: Path, tmp_path: Path
) -> None:
    made = evaluate(model, base, EvaluationRequest(("reds",), own_task), quiet)
    (row,) = made["results"]
    between = row["difference"]
    assert between["value"] == pytest.approx(row["after"]["value"] - row["before"]["value"])
    assert between["gained"] - between["lost"] == pytest.approx(between["value"] * 40)
    assert between["test"] == "mcnemar"
    assert row["verdict"] == ("within the noise" if between["p"] >= 0.05 else row["verdict"])
    assert json.loads(save(made, tmp_path / "out").read_text()) == json.loads(json.dumps(made))
    text = format_result(made)
    assert "is 0 red?" in text
    assert f"{row['before']['value']:.4f} ± {row['before']['stderr']:.4f}" in text
    same = evaluate(
        model, model, EvaluationRequest(("reds", "by_length"), own_task, limit=10), quiet
    )
    assert {row["metric"] for row in same["results"] if row["task"] == "by_length"} == {
        "acc_norm",
        "acc",
    }
    assert "metric=acc_norm" in report.lines(same)[1], (
        "the one that the task lists first is its own"
    )
    assert same["results"][0]["verdict"] == "within the noise"
    assert report.sentences(same)[0].endswith(
        "this is within the noise (0 won, 0 lost, p = 1 by McNemar's exact test)"
    )
    assert same["results"][0]["n"] == 10


def test_how_far_it_has_come_is_said(
    model: Path, own_task: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    import datasets
    from huggingface_hub import constants
    from lm_eval.api import task

    def settings() -> list[Any]:
        own = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("PYTEST_", "KMP_"))
        }
        return [
            own,
            constants.HF_HUB_OFFLINE,
            datasets.config.HF_DATASETS_CACHE,
            vars(task.tqdm)["__init__"],
        ]

    said: list[str] = []
    before = settings()
    tasks = Tasks(EvaluationRequest(("reds",), own_task, limit=5))
    tasks.measure(model, progress=HarnessProgress(said.append, interval_seconds=0))
    tasks.close()
    assert settings() == before, "what a notebook does next is not offline, and has its bars"
    assert said == [f"{done} of 10 requests" for done in range(1, 10)]
    assert "Tokenizing inputs" not in capfd.readouterr().err, "a bar in a log"


@pytest.mark.slow
def test_what_cannot_be_asked_is_one_sentence(
    model: Path, own_task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lm_eval.tasks._index import TaskIndex

    # The harness reads 14,000 files for a task that the folder has not, in ten seconds.
    some = staticmethod(lambda root: sorted(root.glob("*.yaml")) or sorted(root.glob("arc/*.yaml")))
    monkeypatch.setattr(TaskIndex, "_iter_yaml_files", some)
    with pytest.raises(ConfigError, match="there is no task 'redz'; did you mean reds"):
        evaluate(model, None, EvaluationRequest(("redz",), own_task), quiet)
    with pytest.raises(DataError, match=r"holds no config\.json"):
        evaluate(tmp_path, None, EvaluationRequest(("reds",), own_task), quiet)
    with pytest.raises(DataError, match=r"holds no task's \.yaml and no MMLU"):
        evaluate(model, None, EvaluationRequest(("reds",), tmp_path), quiet)
    with pytest.raises(ConfigError, match="chat_template: the tokenizer of"):
        evaluate(model, None, EvaluationRequest(("reds",), own_task, chat_template=True), quiet)
    without = tmp_path / "without"
    shutil.copytree(own_task, without)
    (without / "questions.jsonl").unlink()
    with pytest.raises(DataError, match="the data of reds cannot be read"):
        evaluate(model, None, EvaluationRequest(("reds",), without), quiet)
    broken = as_csv(tmp_path / "mmlu")
    (broken / "test/anatomy_test.csv").write_text("a question,A,B,C,D,7\n")
    with pytest.raises(DataError, match="row 1 is not a question, four choices and a letter"):
        evaluate(model, None, EvaluationRequest(("mmlu",), broken), quiet)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # peft asks transformers 5 by an older name
def test_an_adapter_is_evaluated_on_its_base_and_refused_on_another(
    model: Path, own_task: Path, tmp_path: Path
) -> None:
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    config = peft.LoraConfig(
        target_modules=["q_proj"], task_type="CAUSAL_LM", init_lora_weights=False, lora_alpha=64
    )
    trained: Any = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(model), config)
    trained.save_pretrained(tmp_path / "adapter")
    whole = tmp_path / "whole"
    shutil.copytree(model, whole)
    trained.merge_and_unload().save_pretrained(whole)
    request = EvaluationRequest(("reds",), own_task, limit=10)
    unmerged, merged = (
        evaluate(tmp_path / "adapter", None, request, quiet, model),
        evaluate(whole, None, request, quiet),
    )
    assert unmerged["results"] == merged["results"]
    with pytest.raises(
        CheckpointError, match=r"its factors have the shapes of another model's\); name the model"
    ):
        evaluate(tmp_path / "adapter", None, request, quiet, make(tmp_path / "narrow", "llama"))


def test_a_model_is_named_from_where_the_command_is_typed(
    model: Path, own_task: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(model.parent)
    made = evaluate(Path(model.name), None, EvaluationRequest(("reds",), own_task, limit=2), quiet)
    assert made["cut_requests"]["after"] == 0


def test_prompts_that_lose_their_beginning_are_counted(
    model: Path, own_task: Path, tmp_path: Path
) -> None:
    short = tmp_path / "short"
    shutil.copytree(model, short)
    config = json.loads((short / "config.json").read_text())
    (short / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 4}))
    said: list[str] = []
    made = evaluate(short, None, EvaluationRequest(("reds",), own_task, limit=3), said.append)
    assert made["cut_requests"]["after"] == 6
    assert "6 requests are longer than the model's positions and were cut at the beginning" in said


OFFLINE = """
import runpy, socket, sys

def refused(self, address):
    if self.family != socket.AF_UNIX:
        raise SystemExit(f"asked the network for {{address}}")

socket.socket.connect = refused
sys.path.insert(0, {script!r}.rpartition("/")[0])
sys.argv = [{script!r}]
runpy.run_path({script!r}, run_name="__main__")
"""


def cut_off() -> bool:
    """Whether this machine lets a process leave the network."""
    if shutil.which("unshare") is None:
        return False
    return (
        subprocess.run(["unshare", "-rn", "true"], capture_output=True, check=False).returncode == 0
    )


CUT_OFF = [
    pytest.mark.full,
    pytest.mark.skipif(not cut_off(), reason="a user may not make network namespaces here"),
]


@pytest.mark.parametrize("network", [True, pytest.param(False, marks=CUT_OFF)], ids=["", "cut off"])
@pytest.mark.full
def test_the_stage_runs_cut_off_from_every_network(
    model: Path, base: Path, tmp_path: Path, network: bool
) -> None:
    """In the gate only its sockets are refused, as it is a copy of a Python that has imported
    torch.
    """
    shell = Shell(tmp_path / "ml")
    for name, folder in (
        ("model", model),
        ("base", base),
        ("tasks", as_parquet(tmp_path / "mmlu")),
    ):
        shell.channel(name, folder)
    (shell.root / "input/data/config").mkdir(parents=True)
    config = JobConfig.model_validate(
        {
            "model": {"path": "s3://unused"},
            "evaluate": {"tasks": ["mmlu"], "data": "s3://unused", "limit": 3},
        }
    )
    (shell.root / "input/data/config/config.json").write_text(
        json.dumps(keys_of(config, "evaluate"))
    )
    kept = {k: v for k, v in os.environ.items() if not k.startswith("HF_")}
    kept |= {
        "SMTRAIN_ML_ROOT": str(shell.root),
        "HF_HOME": str(tmp_path / "hf"),
        "OMP_NUM_THREADS": "1",
    }
    script = REPO / "entrypoints/evaluate.py"
    if network:
        (tmp_path / "offline.py").write_text(OFFLINE.format(script=str(script)))
        done = warm.run([tmp_path / "offline.py"], kept)
    else:
        command = ["unshare", "-rn", sys.executable, str(script)]
        done = subprocess.run(command, env=kept, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    made = json.loads((shell.root / "model/evaluation.json").read_text())
    assert {row["task"]: row["n"] for row in made["results"]}["mmlu"] == 6
    line = next(line for line in done.stdout.splitlines() if line.startswith("evaluation mmlu="))
    request = stage_named("evaluate").metrics(config, None)
    assert request == ("mmlu", "mmlu_base")
    for name in request:
        assert re.search(rf"\b{name}=([-+]?[0-9.]+)", line)


@pytest.mark.full  # another Python; the gate has the same task in its own process
def test_the_stage_runs_generated_code(silent: Path, tmp_path: Path) -> None:
    """The stage's script has the name of a library that the harness imports for this task."""
    shell = Shell(tmp_path / "ml")
    humaneval_of_hub(tmp_path / "data")
    shell.channel("model", silent)
    shell.channel("tasks", tmp_path / "data")
    (shell.root / "input/data/config").mkdir(parents=True)
    told = {
        "tasks": ["humaneval"],
        "data": "s3://unused",
        "base": False,
        "run_generated_code": True,
    }
    config = JobConfig.model_validate({"model": {"path": "s3://unused"}, "evaluate": told})
    (shell.root / "input/data/config/config.json").write_text(
        json.dumps(keys_of(config, "evaluate"))
    )
    env = {"SMTRAIN_ML_ROOT": str(shell.root), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(REPO / "entrypoints/evaluate.py")]
    done = subprocess.run(
        command, env={**os.environ, **env}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "evaluation humaneval=0.500000 metric=pass@1 n=4" in done.stdout


def test_a_key_that_is_off_changes_no_job() -> None:
    """A run of the previous release finds its evaluation, which had no such key."""
    off = JobConfig.model_validate(
        {"model": {"path": "s3://unused"}, "evaluate": {"tasks": ["mmlu"]}}
    )
    on = {"tasks": ["mmlu"], "run_generated_code": True}
    assert "run_generated_code" not in keys_of(off, "evaluate")["evaluate"]
    assert keys_of(
        off.model_copy(update={"evaluate": off.evaluate.model_validate(on)}), "evaluate"
    ) != keys_of(off, "evaluate")


def test_tasks_that_run_code_or_take_no_examples_are_refused_first(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for more, sentence in (
        (
            ["humaneval"],
            (
                "--tasks: humaneval run code that the model writes; turn --run-generated-code on to"
                " run it in"
            ),
        ),
        (
            ["agieval", "--num-fewshot", "5"],
            "--num-fewshot: the harness has no worked examples for agieval, not 5",
        ),
        (
            ["bbh", "--num-fewshot", "4"],
            "--num-fewshot: the harness has 3 worked examples for bbh, not 4; leave",
        ),
    ):
        assert (
            call("evaluate", "smtrain.cli.evaluate", ["s3://nowhere/model", "--tasks", *more]) == 2
        )
        assert sentence in capsys.readouterr().err


def test_missing_data_is_an_error_before_a_model_is_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a hub and a cached data set the error comes in seconds; the hub's library alone
    retries for 40.
    """
    for name in ("HF_HUB_OFFLINE", "HF_HUB_CACHE", "HF_DATASETS_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    begun = time.process_time()
    assert call("evaluate", "smtrain.cli.evaluate", ["s3://nowhere/model", "--tasks", "mmlu"]) == 2
    assert time.process_time() - begun < 5
    error = capsys.readouterr().err
    assert "--tasks: the data of mmlu cannot be read (it is not on this machine" in error
    assert (
        "give a folder that has it (--data: MMLU (SUBJECT/test-*.parquet, or"
        " test/SUBJECT_test.csv))" in error
    )
    assert not can_reach_hub(EvaluationRequest(("mmlux",))), (
        "which task there is not, the harness tells"
    )
    (tmp_path / "hub/datasets--cais--mmlu").mkdir(parents=True)
    assert not can_reach_hub(EvaluationRequest(("mmlu",))), "it may be what is kept here"


def test_a_hub_that_answers_anything_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refuses(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.send_error(405)

        def log_message(self, *_: object) -> None: ...

    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    with ThreadingHTTPServer(("127.0.0.1", 0), Refuses) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        assert hub_answers()
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        assert not hub_answers()
        server.shutdown()


def test_a_task_that_the_harness_never_heard_of_is_refused_before_it_is_imported() -> None:
    code = (
        "import sys\nfrom smtrain.worker.evaluation.harness import EvaluationRequest\nfrom"
        " smtrain.worker.evaluation.harness import"
        " refuse_unknown_tasks\nrefuse_unknown_tasks(EvaluationRequest(('hellaswag', 'mmlu_*',"
        " 'gsm8k')))\ntry:\n    refuse_unknown_tasks(EvaluationRequest(('helaswag',)))\nexcept"
        " Exception as error:\n    print(error)\nassert not {'lm_eval', 'torch'} &"
        " sys.modules.keys()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "tasks: there is no task 'helaswag'; did you mean hellaswag?\n"
