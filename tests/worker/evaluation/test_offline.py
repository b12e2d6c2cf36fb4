"""The files of benchmarks: every form gives the same questions, and a wrong file its sentence."""

from __future__ import annotations

import gzip
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from smtrain.core.benchmarks import BENCHMARKS, benchmark_of, benchmarks_in, tasks_of
from smtrain.core.errors import DataError
from smtrain.worker.data.read.ignored_fields import IgnoredText
from smtrain.worker.evaluation.offline import write_tasks
from tests.extras import need
from tests.worker.evaluation import benchmark_files as files

need("lm_eval")
NAMES = {
    "boolq": ("boolq",),
    "bbh": ("bbh", "bbh_zeroshot"),
    "agieval": ("agieval",),
    "ceval": ("ceval-valid",),
    "humaneval": ("humaneval",),
}


@pytest.mark.parametrize("name", files.FORMS)
def test_every_form_of_a_benchmark_gives_the_same_questions(name: str, tmp_path: Path) -> None:
    written = []
    for at, form in enumerate(files.FORMS[name]):
        folder = tmp_path / form.__name__
        form(folder)
        made = write_tasks(folder, NAMES[name], tmp_path / f"{at}", IgnoredText())
        assert set(made) <= set(tasks_of(benchmarks_in(folder))), (
            "the client knows what the worker makes"
        )
        assert set(NAMES[name]) <= set(made)
        written.append(
            {path.name: path.read_text() for path in sorted((tmp_path / f"{at}").rglob("*.jsonl"))}
        )
    assert all(one == written[0] for one in written)
    assert all(written[0].values())
    if name == "agieval":
        rows = [json.loads(line) for line in written[0]["aqua-rat_test.jsonl"].splitlines()]
        assert rows == files.prompted(files.MCQ)


def test_benchmarks_in_one_folder_are_told_apart(tmp_path: Path) -> None:
    for forms in files.FORMS.values():
        for form in forms:
            form(tmp_path / form.__name__)
    found = benchmarks_in(tmp_path)
    assert {name: sorted(parts) for name, parts in found.items()} == {
        "boolq": ["boolq"],
        "bbh": ["boolean_expressions"],
        "agieval": ["aqua-rat", "math"],
        "ceval": ["logic"],
        "humaneval": ["humaneval"],
    }
    from tests.worker.evaluation.mmlu_files import as_csv

    as_csv(tmp_path / "mmlu")
    assert sorted(benchmarks_in(tmp_path)["mmlu"]) == ["anatomy", "college_physics"]
    for task, name in (
        ("agieval_lsat_ar", "agieval"),
        ("bbh", "bbh"),
        ("humaneval_plus", None),
        ("mmlu_stem", "mmlu"),
    ):
        assert benchmark_of(task) == name


def test_examples_may_be_missing_and_other_fields_are_counted(tmp_path: Path) -> None:
    files.boolq_of_google(tmp_path)
    (tmp_path / "train.jsonl").unlink()
    unread = IgnoredText()
    write_tasks(tmp_path, ("boolq",), tmp_path / "work", unread)
    assert unread == {"title": 8}
    assert "training_split: null" in (tmp_path / "work/boolq/boolq.yaml").read_text()


def replaced(form: Callable[[Path], None], name: str, content: bytes) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        form(folder)
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)

    return write


def twice(folder: Path) -> None:
    files.agieval_of_authors(folder)
    shutil.copytree(folder / "data/v1_1", folder / "data/v1")


PARQUET = "boolean_expressions/test-00000-of-00001.parquet"
CSV = b"id,question,A,B,C,D,answer\n1,why,a,b,c,d,E\n"


@pytest.mark.parametrize(
    ("name", "form", "sentence"),
    [
        (
            "boolq",
            replaced(
                files.boolq_of_google,
                "dev.jsonl",
                b'{"question": "q", "passage": "p", "answer": 2}',
            ),
            (
                r"dev\.jsonl: record 1 has no true or false in answer, so it is not one of BoolQ;"
                r" correct it or remove"
            ),
        ),
        (
            "boolq",
            replaced(
                files.boolq_of_google,
                "dev.jsonl",
                b'{"question": "q", "passage": "p", "label": 1}\n{',
            ),
            r"dev\.jsonl cannot be read \(line 2 is not JSON: .*\); replace it by a whole copy",
        ),
        (
            "boolq",
            replaced(
                files.boolq_of_google, "val.jsonl", b'{"question": "q", "passage": "p", "label": 1}'
            ),
            (
                r"dev\.jsonl and .*val\.jsonl are two copies of BoolQ's boolq; give a folder that"
                r" has one"
            ),
        ),
        (
            "bbh",
            replaced(files.bbh_of_authors, "bbh/boolean_expressions.json", b'{"canary": ""}'),
            r"cannot be read \(it has no list of examples\)",
        ),
        (
            "bbh",
            replaced(files.bbh_of_authors, "bbh/snarks.json", b'[{"input": "i", "answer": "a"}]'),
            r"snarks\.json: record 1 has no field target, so it is not one of BBH",
        ),
        (
            "bbh",
            replaced(files.bbh_of_hub, PARQUET, b"PAR1"),
            r"parquet cannot be read \(.*\); replace it by a whole",
        ),
        (
            "bbh",
            replaced(files.bbh_of_authors, PARQUET, b""),
            r"two copies of BBH's boolean_expressions",
        ),
        (
            "agieval",
            replaced(
                files.agieval_of_authors,
                "sat-en.jsonl",
                b'{"question": "q", "options": ["a", "b"]}',
            ),
            r"sat-en\.jsonl: record 1 has the label None, which is no letter from A to B",
        ),
        (
            "agieval",
            replaced(files.agieval_of_authors, "sat-en.jsonl", b'{"question": "q", "label": "A"}'),
            r"record 1 has no list of two to seven options",
        ),
        (
            "agieval",
            replaced(files.agieval_of_authors, "sat-en.jsonl", b"\n"),
            r"sat-en\.jsonl holds no question; put",
        ),
        (
            "agieval",
            replaced(files.agieval_of_authors, "sat-en.jsonl", b"[1]"),
            r"record 1 is not an object",
        ),
        (
            "agieval",
            twice,
            r"v1/aqua-rat\.jsonl and .*v1_1/aqua-rat\.jsonl are two copies of AGIEval's aqua-rat",
        ),
        (
            "ceval",
            replaced(files.ceval_of_authors, "val/logic_val.csv", CSV),
            r"logic_val\.csv: record 1 has the answer 'E', which is no letter from A to D",
        ),
        (
            "ceval",
            replaced(
                files.ceval_of_authors, "val/logic_val.csv", b"id,question,A,B,C,D\n1,why,a,b,c,d\n"
            ),
            r"logic_val\.csv: record 1 has no field answer",
        ),
        (
            "ceval",
            replaced(files.ceval_of_authors, "val/logic_val.csv", b"id,question,A\n1,\xff\n"),
            "cannot be read",
        ),
        (
            "humaneval",
            replaced(files.humaneval_of_authors, "HumanEval.jsonl.gz", gzip.compress(b"{}")[:-9]),
            (
                r"HumanEval\.jsonl\.gz cannot be read \(Compressed file ended .*\); replace it by a"
                r" whole copy"
            ),
        ),
        (
            "humaneval",
            replaced(
                files.humaneval_unpacked, "data/HumanEval.jsonl", b'{"task_id": "0", "prompt": 3}'
            ),
            r"HumanEval\.jsonl: record 1 has no text in prompt, so it is not one of HumanEval",
        ),
        (
            "humaneval",
            replaced(files.humaneval_unpacked, "HumanEval.jsonl.gz", b""),
            r"two copies of HumanEval's",
        ),
    ],
)
def test_a_wrong_file_has_its_sentence(
    name: str, form: Callable[[Path], None], sentence: str, tmp_path: Path
) -> None:
    form(tmp_path / "data")
    with pytest.raises(DataError, match=sentence) as refused:
        write_tasks(tmp_path / "data", NAMES[name], tmp_path / "work", IgnoredText())
    assert "\n" not in str(refused.value)


def test_every_benchmark_has_tasks_of_the_harness() -> None:
    from smtrain.worker.evaluation.offline import tasks_folder

    named = {
        line.split(":", 1)[1].strip().strip("\"'")
        for path in tasks_folder().rglob("*.yaml")
        if path.parts[-2]
        in ("boolq", "agieval", "ceval", "humaneval", "default", "cot_fewshot", "zeroshot")
        for line in path.read_text("utf-8").splitlines()
        if line.strip("\"'").startswith(("task:", 'task":', "group:"))
    }
    for benchmark in BENCHMARKS.values():
        for task in benchmark.tasks:
            if "PART" not in task and "cot_zeroshot" not in task and not task.endswith("_fewshot"):
                assert task in named, task
