"""The sbatch script of a stage: a pure function, compared with a golden file; bash can parse it."""

from __future__ import annotations

import itertools
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest

from smtrain.client.backends.slurm.script import minutes, sbatch_script
from smtrain.core.config.cluster import Cluster
from smtrain.core.errors import ConfigError

GOLDEN = Path(__file__).with_name("golden")


def request(stage: str = "train", **changes: Any) -> dict[str, Any]:
    source = {"S3DataType": "S3Prefix", "S3Uri": "file:///fsx/smtrain/code/0123456789abcdef/"}
    return {
        "TrainingJobName": f"llama-{stage}-1a2b3c4d",
        "HyperParameters": {"stage": stage},
        "InputDataConfig": [{"ChannelName": "code", "DataSource": {"S3DataSource": source}}],
        "OutputDataConfig": {"S3OutputPath": "file:///fsx/smtrain/llama/jobs"},
        "ResourceConfig": {
            "InstanceType": "ml.trn1.32xlarge",
            "InstanceCount": 4 if stage == "train" else 1,
        },
        "StoppingCondition": {"MaxRuntimeInSeconds": 86400},
        "Environment": {
            "FI_PROVIDER": "efa",
            "NOTE": "it's $HOME",
            "SMTRAIN_CHECKPOINTS": "file:///fsx/smtrain/c/",
        },
        **changes,
    }


CLUSTER = Cluster(
    shared="/fsx/smtrain",
    partition="trn1",
    cpu_partition="cpu",
    account="lab",
    qos="high",
    reservation="block",
    constraint="efa",
    time=14400,
    venv="/fsx/venv",
    modules=("python/3.11",),
    setup=("export A=1",),
    sbatch=("--mail-type=END",),
    srun=("--cpu-bind=none",),
    hyperpod=True,
)


def test_the_script_of_a_train_stage_is_the_file() -> None:
    assert sbatch_script(request(), CLUSTER) == (GOLDEN / "train.sh").read_text("utf-8")


@pytest.mark.parametrize("stage", ["prepare", "convert", "train", "export"])
def test_bash_reads_every_script(stage: str) -> None:
    done = subprocess.run(
        ["bash", "-n"], input=sbatch_script(request(stage), CLUSTER), text=True, capture_output=True
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_the_environment_is_quoted_and_names_paths() -> None:
    script = sbatch_script(request(), CLUSTER)
    exports = "\n".join(
        line for line in script.splitlines() if line.startswith("export ") and "MASTER" not in line
    )
    shown = f'{exports}\nprintf %s "$NOTE|$SMTRAIN_CHECKPOINTS"'
    done = subprocess.run(["bash", "-c", shown], capture_output=True, text=True)
    assert done.stdout == "it's $HOME|/fsx/smtrain/c/"


def test_stages_on_cpus_go_to_their_partition_and_do_not_restart() -> None:
    script = sbatch_script(request("convert"), CLUSTER)
    assert "#SBATCH --partition=cpu\n" in script
    assert "\nrestarts=0\n" in script
    assert "#SBATCH --partition=trn1\n" in sbatch_script(request(), CLUSTER)


def test_a_preparation_on_several_machines_has_so_many_nodes() -> None:
    script = sbatch_script(
        request("prepare", ResourceConfig={"InstanceType": "", "InstanceCount": 3}), CLUSTER
    )
    assert "#SBATCH --nodes=3\n" in script
    assert "\nsrun --nodes=3 --ntasks-per-node=1 --kill-on-bad-exit=1 " in script


def test_a_time_limit_is_in_whole_minutes_and_never_shorter() -> None:
    assert minutes(request(), Cluster(shared="/fsx", time=61)) == 2
    assert minutes(request(), Cluster(shared="/fsx")) == 1440


def test_containers_are_those_of_pyxis_or_apptainer() -> None:
    pyxis = sbatch_script(
        request(), Cluster(shared="/fsx", container="nvcr.io#nvidia/pytorch:25.01-py3")
    )
    assert "srun --nodes=4 --ntasks-per-node=1 --kill-on-bad-exit=1 --container-image=" in pyxis
    assert "--container-mounts=/fsx:/fsx python3 " in pyxis
    apptainer = sbatch_script(request(), Cluster(shared="/fsx", container="/fsx/torch.sif"))
    assert "--kill-on-bad-exit=1 apptainer exec --bind /fsx /fsx/torch.sif python3 " in apptainer


def mounted(script: str) -> dict[str, list[str]]:
    """Each folder that the container of the stage sees, with the rest of its mount."""
    (line,) = [line for line in script.splitlines() if "slurm_node.py" in line]
    words = shlex.split(line)
    mounts = [word for before, word in itertools.pairwise(words) if before == "--bind"]
    for word in words:
        if word.startswith("--container-mounts="):
            mounts = word.partition("=")[2].split(",")
    return {mount.split(":")[0]: mount.split(":")[1:] for mount in mounts}


@pytest.mark.parametrize("image", ["nvcr.io#nvidia/pytorch:25.01-py3", "/fsx/torch.sif"])
def test_a_container_sees_each_input_outside_the_shared_folder(image: str) -> None:
    def seen(*uris: str, shared: str = "/fs/smtrain") -> dict[str, list[str]]:
        sent = request()
        for number, uri in enumerate(uris):
            source = {"S3DataType": "S3Prefix", "S3Uri": uri}
            sent["InputDataConfig"].append(
                {"ChannelName": f"text_{number}", "DataSource": {"S3DataSource": source}}
            )
        script = sbatch_script(sent, Cluster(shared=shared, container=image))
        assert subprocess.run(["bash", "-n"], input=script, text=True).returncode == 0
        return mounted(script)

    whole = ["/fs/smtrain"] if "#" in image else []
    code = {
        "/fsx/smtrain/code/0123456789abcdef": ["/fsx/smtrain/code/0123456789abcdef", "ro"]
    }  # of `request`
    assert seen("file:///fs/smtrain/inputs/model/") == code | {"/fs/smtrain": whole}
    outside = seen(
        "file:///fs/model", "file:///fs/my text/a.jsonl", "file:///fs/model/deeper", "s3://b/text"
    )
    assert outside == code | {
        "/fs/smtrain": whole,
        "/fs/model": ["/fs/model", "ro"],
        "/fs/my text/a.jsonl": ["/fs/my text/a.jsonl", "ro"],
    }
    around = seen("file:///fs")
    assert list(around) == [
        "/fs",
        "/fs/smtrain",
        *code,
    ], "a folder mounted later would hide the shared folder"
    assert seen("file:///fs/smtrain-old/model")["/fs/smtrain-old/model"][-1] == "ro"
    with pytest.raises(ConfigError, match=r"cluster\.container: /fs/a,b cannot be mounted in it"):
        seen("file:///fs/a,b")


def test_inputs_in_s3_are_copied_by_one_task_before_the_stage_starts() -> None:
    source = {"S3DataType": "S3Prefix", "S3Uri": "s3://bucket/text"}
    channel = {"ChannelName": "text", "DataSource": {"S3DataSource": source}}
    sent = request("prepare")
    sent["InputDataConfig"] = [*sent["InputDataConfig"], channel]
    script = sbatch_script(sent, Cluster(shared="/fsx", container="/fsx/torch.sif"))
    copy, stage = [line for line in script.splitlines() if line.startswith("srun ")]
    assert copy.startswith(
        "srun --nodes=1 --ntasks-per-node=1 --kill-on-bad-exit=1 --ntasks=1 apptainer exec "
    )
    assert 'python3 "$job/code/entrypoints/s3_inputs.py" "$job" /fsx || {' in copy
    assert "slurm_node.py" in stage
    assert subprocess.run(["bash", "-n"], input=script, text=True).returncode == 0
