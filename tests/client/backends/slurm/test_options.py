"""Options of a config reach Slurm unchanged, by the script and by `smtrain check`."""

from __future__ import annotations

import random
import re
import string
import subprocess

import pytest

from smtrain.client.backends.slurm.script import directive, node_options
from smtrain.core.config.cluster import Cluster
from tests.client.backends.slurm.conftest import Bench
from tests.client.backends.slurm.test_jobs import counting

chance = random.Random(1)
VALUES = [
    "two words",
    "a#b",
    "# first",
    "it's",
    'say "hi"',
    '"all of it"',
    "$HOME and `id`",
    "back\\slash",
    "the last\\",
    "a  b\tc",
    "--x=y z",
    "a=b",
    "%j",
    "grün 漢",
    string.punctuation,
    *("".join(chance.choices(string.printable[:95], k=40)).strip() for _ in range(10)),
]


@pytest.mark.parametrize("value", VALUES)
def test_slurm_reads_in_a_script_what_was_written(bench: Bench, value: str) -> None:
    script = (
        f"#!/bin/sh\n{directive(f'--comment={value}')}\n#SBATCH --hold\n#SBATCH"
        " --output=/dev/null\ntrue\n"
    )
    done = subprocess.run(["sbatch", "--parsable"], input=script, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    shown = bench.slurm.run("scontrol", "show", "job", done.stdout.strip())
    bench.slurm.run("scancel", done.stdout.strip())
    comment = re.search(r"^ *Comment=(.*?) *$", shown, re.MULTILINE)
    assert comment
    assert comment[1] == value


def test_a_stage_runs_with_an_option_of_two_words(bench: Bench) -> None:
    place = bench.place(
        sbatch=["--comment=two words # and more", "--chdir=/nowhere", "--export=NONE", "--requeue"]
    )
    job = bench.start(place, counting())
    id_ = (bench.shared / "run/jobs" / job.name / "id").read_text().strip()
    assert "Comment=two words # and more" in bench.slurm.run("scontrol", "show", "job", id_)
    assert bench.ended(job)["TrainingJobStatus"] == "Completed", job.explain()


@pytest.mark.parametrize("stage", ["prepare", "train"])
@pytest.mark.parametrize(
    ("options", "taken"),
    [
        ([], True),
        (["--comment=two words"], True),
        (["--mem=1"], True),
        (["--cpus-per-task=2"], True),
        (["--export=HF_HOME,A=b"], True),
        (["--nodelist=node1"], True),
        (["--exclude", "node3"], True),
        (["--oversubscribe"], True),
        (["--nosuch"], False),
        (["--nodelist=nowhere"], False),
        (["--mem=99T"], False),
    ],
)
def test_the_check_and_the_script_are_one_answer(
    bench: Bench, options: list[str], taken: bool, stage: str
) -> None:
    """sbatch answers the options of the check as it answers the complete script of a stage."""
    place = bench.place(sbatch=options)
    lines = "\n".join(["#!/bin/sh", *map(directive, node_options(stage, place.section)), "true\n"])
    for text in (lines, place.preview([bench.request("", stage=stage)])):
        done = subprocess.run(["sbatch", "--test-only"], input=text, capture_output=True, text=True)
        assert (done.returncode == 0) == taken, done.stderr


def test_memory_for_each_cpu_replaces_that_of_the_whole_node(bench: Bench) -> None:
    lines = "\n".join(
        [
            "#!/bin/sh",
            *map(directive, node_options("train", bench.place(sbatch=["--mem-per-cpu=1"]).section)),
            "",
        ]
    )
    done = subprocess.run(["sbatch", "--test-only"], input=lines, capture_output=True, text=True)
    assert "mutually exclusive" not in done.stderr


def test_a_variable_of_the_shell_does_not_replace_what_the_config_says(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {
        "PARTITION": "closed",
        "ARRAY_INX": "1-3",
        "OUTPUT": "/nowhere/x",
        "TIMELIMIT": "1",
    }.items():
        monkeypatch.setenv(f"SBATCH_{name}", value)
    monkeypatch.setenv("SBATCH_EXPORT", "NONE")
    monkeypatch.setenv("SLURM_EXPORT_ENV", "NONE")
    job = bench.start(bench.place(partition="main"), counting())
    assert bench.ended(job)["TrainingJobStatus"] == "Completed", job.explain()
    assert len(job.loss) == 3


def test_stages_on_cpus_take_a_part_of_a_node_if_asked(bench: Bench) -> None:
    program = (
        "import os; print(len(os.sched_getaffinity(0)), os.environ['SLURM_CPUS_PER_TASK'],"
        " flush=True)"
    )
    place = bench.place(cpu_sbatch=["--cpus-per-task=2", "--mem=1"])
    first, second = (
        bench.start(place, f"{program}\nimport time; time.sleep(4)", stage="prepare")
        for _ in range(2)
    )
    nodes = [
        bench.slurm.run("squeue", "-h", "-n", job.name, "-o", "%C %h") for job in (first, second)
    ]
    assert {row.strip() for row in nodes} == {"2 OK"}
    for job in (first, second):
        assert bench.ended(job)["TrainingJobStatus"] == "Completed", job.explain()
    train = bench.start(place, counting(last=30))
    assert bench.slurm.run("squeue", "-h", "-n", train.name, "-o", "%h").strip() == "NO"
    assert bench.ended(train)["TrainingJobStatus"] == "Completed"


def test_whole_nodes_are_asked_for_unless_the_config_asks_for_less() -> None:
    def options(stage: str, **more: tuple[str, ...]) -> set[str]:
        cluster = Cluster.model_validate({"shared": "/fsx", **more})
        return set(node_options(stage, cluster)) & {"--exclusive", "--mem=0"}

    assert options("train") == options("prepare") == {"--exclusive", "--mem=0"}
    assert options("prepare", cpu_sbatch=("--mem=4G",)) == set()
    assert options("train", cpu_sbatch=("--mem=4G",)) == {"--exclusive", "--mem=0"}
    assert options("train", sbatch=("--mem-per-cpu=4G",)) == {"--exclusive"}
