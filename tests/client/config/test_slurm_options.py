"""Options of sbatch and srun in a config: how each is read, and which of them are refused."""

from __future__ import annotations

from typing import Any

import pytest

from smtrain.client.config.slurm_options import Exported, option_faults, options_of
from smtrain.client.planner.resolve import load_config
from smtrain.core.errors import ConfigError


@pytest.mark.parametrize(
    ("given", "read"),
    [
        (["--comment=two words"], ["--comment=two words"]),
        (["--comment two words"], ["--comment=two words"]),
        (["--mail-type", "END"], ["--mail-type=END"]),
        (["-w node1"], ["-wnode1"]),
        (["-w", "node1", "--hold"], ["-wnode1", "--hold"]),
        (["--comment=--x=y z"], ["--comment=--x=y z"]),
        (["--comment="], ["--comment="]),
    ],
)
def test_an_option_and_its_value_are_one_argument(given: list[str], read: list[str]) -> None:
    assert list(options_of(given)) == read


@pytest.mark.parametrize(
    ("option", "says"),
    [
        ("--array=1-3", "one Slurm job"),
        ("-a1-3", "one Slurm job"),
        ("--arr=1", "one Slurm job"),
        ("--nodes=2", "compute.instance_count"),
        ("-N 2", "compute.instance_count"),
        ("-kN2", "compute.instance_count"),
        ("--ntasks=4", "one task on each node"),
        ("--output=/x", "read Slurm's words"),
        ("--error=/x", "read Slurm's words"),
        ("--open-mode=truncate", "read Slurm's words"),
        ("--job-name=x", "found by its name"),
        ("--time=10", "cluster.time"),
        ("--signal=USR1@10", "cluster.save_before"),
        ("--no-requeue", "requeues itself"),
        ("--wait", "run with --wait"),
        ("--wrap=true", "cluster.setup"),
        ("--partition=x", "cluster.partition"),
        ("-A lab", "cluster.account"),
        ("--clusters=other", "cluster.host"),
        ("--test-only", "no job would run"),
        ("-V", "no job would run"),
        ("--get-user-env", "--export=NAME"),
        ("--export-file=/x", "compute.environment"),
        ("--export=A-B", "compute.environment"),
        ("--export=", "names no variable"),
        ("--comment=a\nb", "in one line"),
        ("--comment=a\rb", "in one line"),
        ("", "is not an option"),
        ("word", "is not an option"),
    ],
)
def test_what_would_break_the_stage_is_refused_with_what_to_do(
    raw: dict[str, Any], option: str, says: str
) -> None:
    settings = {**raw, "target": "slurm", "cluster": {"shared": "/fsx", "sbatch": [option]}}
    with pytest.raises(ConfigError) as refused:
        load_config(settings)
    (fault,) = refused.value.faults
    assert fault.startswith("cluster.sbatch: ")
    assert says in fault
    assert "\n" not in fault


@pytest.mark.parametrize(
    "option",
    [
        "--export=NONE",
        "--export=NIL",
        "--export=ALL",
        "--export=HF_HOME,MODE=fast",
        "--chdir=/tmp",
        "-D/tmp",
        "--requeue",
        "-H",
        "--comment=two words",
        "--comment=",
        "--mem=4G",
        "--mem-per-cpu=2G",
        "--cpus-per-task=4",
        "--gres=gpu:8",
        "--exclusive",
        "--oversubscribe",
        "--nodelist=n[1-2]",
        "-xn3",
        "--mail-type=END",
        "--dependency=singleton",
        "--parsable",
        "--quiet",
        "--time-min=10",
        "--wait-all-nodes=1",
        "--contiguous",
        "--nice=5",
        "--hold",
        "--begin=now+60",
        "--tmp=1G",
    ],
)
def test_what_a_stage_runs_with_is_taken(option: str) -> None:
    assert list(option_faults([option], "sbatch")) == []


@pytest.mark.parametrize(
    "option",
    [
        "--export=NONE",
        "--exp=NONE",
        "-n2",
        "--output=x",
        "--kill-on-bad-exit=0",
        "-W 0",
        "--pty",
        "--nodes=1",
        "-Z",
    ],
)
def test_srun_has_options_of_its_own_that_break_a_stage(option: str) -> None:
    assert len(list(option_faults([option], "srun"))) == 1
    assert list(option_faults(["--cpu-bind=none", "--mpi=pmix", "-l"], "srun")) == []


@pytest.mark.parametrize("value", [True, 3, None, {"--comment": "two words"}, ["--hold"]])
def test_an_option_is_text(raw: dict[str, Any], value: object) -> None:
    settings = {**raw, "target": "slurm", "cluster": {"shared": "/fsx", "sbatch": [value]}}
    with pytest.raises(ConfigError, match=r"^cluster\.sbatch"):
        load_config(settings)


def test_a_secret_written_out_in_an_option_is_refused_and_not_repeated(raw: dict[str, Any]) -> None:
    secret = "hf_abcdefghijklmnopqrstuvwxyzabcdefgh"
    settings = {
        **raw,
        "target": "slurm",
        "cluster": {"shared": "/fsx", "sbatch": [f"--export=HF_TOKEN={secret}"]},
    }
    with pytest.raises(ConfigError, match="looks like a secret") as refused:
        load_config(settings)
    assert secret not in str(refused.value)


def test_what_export_names_is_added_to_what_slurm_needs() -> None:
    assert Exported.of(["--export=NONE"]) == Exported()
    exported = Exported.of(["--hold", "--export=HF_HOME,MODE=fast", "--export=ALL"])
    assert (exported.all_variables, exported.names, exported.values) == (
        True,
        ("HF_HOME",),
        (("MODE", "fast"),),
    )
