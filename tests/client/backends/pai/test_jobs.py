"""Jobs of a user's command through the stand-in for PAI-DLC: submit, follow, stop, repeat; faults
of the cloud.
"""

from __future__ import annotations

import json
import logging
import os
import shlex
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

import smtrain
from smtrain import CheckpointError, ConfigError, JobError
from smtrain.client.backends.pai import backend as place_module
from smtrain.client.backends.pai.backend import PaiBackend
from smtrain.client.backends.pai.cloud import Cloud
from smtrain.client.backends.pai.logs import PodLogs, pods_of
from smtrain.client.backends.pai.registry import REGISTRY
from smtrain.client.launch.stages import Chain
from smtrain.core.config.pai import Pai
from smtrain.tools.report.gather import gather
from testing.pai_dlc import StandIn, StandInJob
from tests.client.backends.pai.conftest import BOX, wait_for
from tests.conftest import LLAMA

THREE = """\
echo "pod $RANK of $WORLD_SIZE, $NPROC_PER_NODE a pod, $MASTER_ADDR"
[ "$RANK" != 0 ] || { cp "$SMTRAIN_INPUTS/model/config.json" "$SMTRAIN_OUTPUT/"; }
[ ! -e "$SMTRAIN_CHECKPOINTS/$RANK" ] || { echo "resumes from $(cat "$SMTRAIN_CHECKPOINTS/$RANK")"; exit; }
trap 'echo saved; echo 7 >"$SMTRAIN_CHECKPOINTS/$RANK"; exit' TERM
echo "waits"
while :; do sleep 0.05; done
"""


def quiet(_text: str) -> None:
    """Say nothing."""


@pytest.fixture
def raw(section: dict[str, Any], model_folder: Path) -> dict[str, Any]:
    """A config whose only stage is a command in three pods."""
    return {
        "name": "own",
        "target": "pai-dlc",
        "machines": {"box": BOX},
        "model": {"path": str(model_folder)},
        "pai": {**section, "command": THREE},
        "train": {"seq_len": 32, "global_batch_size": 3},
        "compute": {"instance_type": "box", "instance_count": 3, "image": "registry/train:1"},
    }


def test_three_pods_are_followed_stopped_and_resumed(
    cloud: StandIn, raw: dict[str, Any], tmp_path: Path
) -> None:
    said: list[str] = []
    job = smtrain.launch(raw, wait=False, say=said.append)
    seen = wait_for(
        lambda: (
            (lines := job.lines()) and sum(line.text == "waits" for line in lines) == 3 and lines
        )
    )
    assert {(line.host, line.text) for line in seen} >= {
        (f"algo-{rank + 1}", f"pod {rank} of 3, 1 a pod, 127.0.0.1") for rank in range(3)
    }
    assert smtrain.launch(raw, wait=False, say=said.append).name == job.name  # joined
    assert len(cloud.jobs) == 1
    job.stop()
    wait_for(lambda: job.status == "Stopped")
    again = smtrain.launch(raw, wait=False, say=said.append)
    assert again.name == f"{job.name}-2"
    wait_for(lambda: again.status == "Completed")
    assert (
        sorted(line.text for line in again.lines() if "resumes" in line.text)
        == ["resumes from 7"] * 3
    )
    assert (again.download(tmp_path / "out") / "config.json").exists()
    listed = [row["TrainingJobName"] for page in job.target.rows("own", 10) for row in page]
    assert listed == [again.name, job.name]


def test_a_report_has_the_losses_and_a_config_that_runs_it_again(
    cloud: StandIn, raw: dict[str, Any], tmp_path: Path
) -> None:
    raw["pai"]["command"] = (
        "for n in 1 2 3; do echo step=$n loss=$((5 - n)).25 tokens_per_s=9.0 of=3; done"
    )
    raw["compute"]["instance_count"] = raw["train"]["global_batch_size"] = 1
    job = smtrain.launch(raw, wait=False, say=quiet)
    wait_for(lambda: job.status == "Completed")
    page = smtrain.report("own", tmp_path / "own.html").read_text("utf-8")
    assert "2.2500" in page
    assert "(from 4.2500)" in page
    assert "registry/train:1" in page
    assert "first describe box under machines" in page
    account = gather(job.name)
    assert (account.name, account.restarts, [one.cost.dollars for one in account.jobs]) == (
        "own",
        0,
        [None],
    )
    again = smtrain.load_config({**account.config, "machines": {"box": BOX}})
    assert Chain(again, job.target).base_name("train") == job.name
    with pytest.raises(
        JobError,
        match="no run of this name on target pai-dlc; `smtrain list --target pai-dlc` lists",
    ):
        gather("nothing", "pai-dlc")


@pytest.mark.full  # the gate writes and reads OSS in jobs
def test_weights_are_converted_from_and_to_oss(
    cloud: StandIn, section: dict[str, Any], trained_inputs: dict[str, Path], tmp_path: Path
) -> None:
    REGISTRY.remember(Pai(**section), "a-train-1234abcd")  # as a launch does
    folder = trained_inputs["model"]
    smtrain.convert(folder, "oss://bucket/shards", to=smtrain.Nxd(tp=2), say=quiet)
    smtrain.convert(folder, "oss://bucket/shards", to=smtrain.Nxd(tp=2), say=quiet)  # it is there
    smtrain.convert("oss://bucket/shards/", tmp_path / "back", to=smtrain.HuggingFace(), say=quiet)
    ours, theirs = (load_file(one / "model.safetensors") for one in (tmp_path / "back", folder))
    assert {name: tensor.tolist() for name, tensor in ours.items()} == {
        n: t.tolist() for n, t in theirs.items()
    }
    with pytest.raises(
        CheckpointError,
        match=r"oss://bucket/shards has other files, such as .*; name another prefix",
    ):
        smtrain.convert(folder, "oss://bucket/shards", to=smtrain.Nxd(tp=4), say=quiet)
    smtrain.convert(folder, "oss://bucket/shards", to=smtrain.Nxd(tp=1), overwrite=True, say=quiet)
    left = [item["Key"] for item in PaiBackend(Pai(**section)).listing("oss://bucket/shards/")]
    assert [key for key in left if "tp_rank_01" in key] == []


def test_the_cause_of_a_failure_is_the_first_pods(cloud: StandIn, raw: dict[str, Any]) -> None:
    raw["pai"]["command"] = "echo no such flag; exit 4"
    job = smtrain.launch(raw, wait=False, say=quiet)
    wait_for(lambda: job.status == "Failed")
    assert job.failure == "it ended with status 4"
    assert "PAI-DLC says: it ended with status 4" in str(job.explain())


def test_what_a_command_has_started_is_told_to_stop_too(
    cloud: StandIn, raw: dict[str, Any]
) -> None:
    inner = "trap 'echo inner saved; exit' TERM; echo inner waits; while :; do sleep 0.05; done"
    raw["pai"]["command"] = f"cd /; bash -c {shlex.quote(inner)}; echo behind"
    raw["compute"]["instance_count"] = raw["train"]["global_batch_size"] = 1
    job = smtrain.launch(raw, wait=False, say=quiet)
    wait_for(lambda: any(line.text == "inner waits" for line in job.lines()))
    job.stop()
    wait_for(lambda: job.status == "Stopped")
    assert any(line.text == "inner saved" for line in job.lines())


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "does",
    [
        'open("f", "a")',
        'open("f", "r+")',
        'os.mkdir("d"); os.rename("d", "e")',
        'os.symlink("f", "l")',
        'fcntl.flock(open("f"), 2)',
    ],
)
def test_the_stand_in_refuses_what_ossfs_cannot_do(
    cloud: StandIn, raw: dict[str, Any], does: str
) -> None:
    program = (
        "import fcntl, os; os.chdir(os.environ['SMTRAIN_JOB_FOLDER']); open('f', 'w').close();"
        f" {does}"
    )
    raw["pai"]["command"], raw["compute"]["instance_count"] = (
        f"python3 -c {shlex.quote(program)}",
        1,
    )
    raw["train"]["global_batch_size"] = 1
    job = smtrain.launch(raw, wait=False, say=quiet)
    wait_for(lambda: job.status == "Failed")
    assert "on an OSS mount" in job.lines()[-2].text


def test_a_waiting_job_is_stopped_and_never_runs(cloud: StandIn, raw: dict[str, Any]) -> None:
    cloud.held = True
    job = smtrain.launch(raw, wait=False, say=quiet)
    assert job.describe()["SecondaryStatus"] == "Pending"
    job.stop()
    assert (job.status, job.lines()) == ("Stopped", [])


def test_a_busy_cloud_is_waited_for_in_a_follow_and_named_in_a_command(
    cloud: StandIn, raw: dict[str, Any]
) -> None:
    cloud.held = True
    job = smtrain.launch(raw, wait=False, say=quiet)
    cloud.busy = 1
    with pytest.raises(
        JobError, match=r"GetJob: Alibaba Cloud does not answer in cn-beijing \(ServiceUnavailable"
    ):
        job.describe()
    cloud.busy = 2
    assert job.describe_patiently()["TrainingJobStatus"] == "InProgress"
    with pytest.raises(JobError, match="no-such-job: no such job in cn-beijing"):
        smtrain.Job("no-such-job", "pai-dlc").describe()


def test_busy_oss_is_asked_again(
    cloud: StandIn, section: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []
    monkeypatch.setattr("time.sleep", waits.append)
    place, uri = PaiBackend(Pai(**section)), "oss://bucket/smtrain/inputs/text/0123/"
    calls = [
        lambda: place.put(uri, [("a", b"bytes")], quiet),
        lambda: place.fetch("bucket", "smtrain/inputs/text/0123/a", tmp_path / "a"),
        lambda: place.read(f"{uri}a"),
        lambda: place.listing(uri),
    ]
    for call in calls:
        waits.clear()
        cloud.busy = 5  # a listing of oss2 is repeated three times by itself
        call()
        assert cloud.busy == 0
        assert waits
    assert (tmp_path / "a").read_bytes() == b"bytes"


def test_one_of_two_launches_creates_the_job(
    cloud: StandIn, raw: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    cloud.held = True
    monkeypatch.setattr(place_module, "_CLAIM_S", 1)
    sent = smtrain.request(raw)
    place = PaiBackend(Pai(**raw["pai"]))
    first = place.submit(sent)
    assert place.submit(sent) is None
    assert place.queued_id(sent["TrainingJobName"]) == first
    cloud.jobs.clear()  # a launch that was cut off after its claim
    assert place.submit(sent) is not None


def test_a_refused_job_leaves_no_claim(cloud: StandIn, raw: dict[str, Any]) -> None:
    sent = smtrain.request(raw)
    place = PaiBackend(Pai(**raw["pai"]))
    sent["AlgorithmSpecification"]["TrainingImage"] = "x"
    made = dict(sent, ResourceConfig={**sent["ResourceConfig"]})
    cloud.refuses = "the quota is used up"
    with pytest.raises(
        JobError, match=r"was not submitted: PAI-DLC has refused CreateJob \(.*the quota is used up"
    ):
        place.submit(made)
    cloud.refuses = ""
    assert place.submit(made)


def test_without_credentials_the_sentence_says_how_to_give_them(
    cloud: StandIn,
    raw: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def noisy(_self: object) -> None:
        logging.getLogger("credentials").error("a traceback")
        raise ValueError("none here")

    monkeypatch.setattr(
        "alibabacloud_credentials.utils.auth_util.environment_access_key_id", None
    )  # read at import
    monkeypatch.setattr(
        "alibabacloud_credentials.provider.profile.ProfileCredentialsProvider.get_credentials",
        noisy,
    )
    with pytest.raises(
        JobError, match="run `aliyun configure`, or set ALIBABA_CLOUD_ACCESS_KEY_ID"
    ):
        smtrain.launch(raw, wait=False, say=quiet)
    assert "a traceback" not in caplog.text


def test_the_place_of_a_job_is_known_here_or_by_a_variable(
    raw: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SMTRAIN_PAI", "cn-beijing/12=oss://bucket/smtrain")
    place = smtrain.Job("own-train-00000000", "pai-dlc").target
    assert isinstance(place, PaiBackend)
    assert (place.section.region, place.section.workspace, place.section.storage) == (
        "cn-beijing",
        "12",
        "oss://bucket/smtrain",
    )
    monkeypatch.setenv("SMTRAIN_PAI", "beijing")
    with pytest.raises(
        ConfigError, match="SMTRAIN_PAI is 'beijing'; it must look like cn-beijing=oss://my-bucket"
    ):
        smtrain.Job("own-train-00000000", "pai-dlc")


def test_check_finds_faults_before_anything_is_paid_for(
    cloud: StandIn, raw: dict[str, Any]
) -> None:
    raw["pai"].update(ecs_spec="ecs.gn7e-c16g1.16xlarg", storage="oss://other/smtrain")
    raw["model"]["path"] = "oss://bucket/none"
    sibling = cloud.bucket("bucket") / "none2/config.json"  # of a prefix with the same beginning
    sibling.parent.mkdir()
    sibling.write_text("{}")
    faults = {finding.check: str(finding) for finding in smtrain.check(raw).faults}
    assert (
        "set pai.ecs_spec to one that it offers, such as ecs.gn7e-c16g1.16xlarge"
        in faults["resources"]
    )
    assert "NoSuchBucket" in faults["storage"]
    assert "there is nothing at oss://bucket/none" in faults["inputs"]
    raw["pai"].update(ecs_spec="ecs.gn7e-c16g1.16xlarge", storage="oss://bucket/smtrain")
    raw["model"]["path"] = "oss://bucket/model"
    described = cloud.bucket("bucket") / "model/config.json"
    described.parent.mkdir()
    (described.parent / "other").touch()
    wrong = {
        "": "holds no config.json",
        "{": "cannot be read",
        json.dumps({**LLAMA, "model_type": "vit"}): "vit",
    }
    for content, says in wrong.items():
        if content:
            described.write_text(content)
        (fault,) = smtrain.check(raw).faults
        assert says in fault.text
    described.write_text(json.dumps(LLAMA))
    assert smtrain.check(raw).ok


class Answers:
    """GetPodLogs with so many lines, as many each second, and at most so many in one answer."""

    def __init__(
        self, count: int, began: int, each_second: int = 4, most: int | None = None
    ) -> None:
        from datetime import datetime, timezone

        self.most = most
        at = [began / 1000 + number / each_second for number in range(count)]
        self.rows = [
            (s, f"{datetime.fromtimestamp(s, timezone.utc).isoformat(timespec='milliseconds')} {n}")
            for n, s in enumerate(at)
        ]
        self.calls = 0

    def lines(
        self, _id: str, _pod: str, _uid: object, start: str, end: str, most: int
    ) -> list[str]:
        from datetime import datetime

        low, high = (
            datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp() for text in (start, end)
        )
        self.calls += 1
        return [line for at, line in self.rows if low <= at <= high][
            -min(most, self.most or most) :
        ]


def test_a_long_log_is_read_whole_and_each_line_once() -> None:
    answers = Answers(9000, 1_790_000_000_000)
    job = {
        "JobId": "dlc1",
        "GmtCreateTime": "2026-09-21T14:13:20Z",
        "Pods": [{"PodId": "dlc1-worker-1", "Type": "worker"}],
    }
    (pod,) = pods_of(job)
    assert pod.host == "algo-2"
    events = PodLogs(answers, "own", job).since(0)  # type: ignore[arg-type]
    assert [int(event["message"]) for event in events] == list(range(9000))
    answers.calls = 0
    last = PodLogs(answers, "own", {**job, "GmtFinishTime": "2026-09-21T14:50:50Z"}).last(100)  # type: ignore[arg-type]
    assert [int(event["message"]) for event in last] == list(range(8900, 9000))
    assert answers.calls < 8


@pytest.mark.parametrize("count", [1_999, 2_001, 10_001, 45_000])
def test_a_second_with_many_lines_is_read_whole(count: int) -> None:
    began = 1_790_000_000_000
    job = {
        "JobId": "dlc1",
        "GmtCreateTime": "2026-09-21T14:13:20Z",
        "Pods": [{"PodId": "dlc1-master-0"}],
    }
    events = PodLogs(Answers(count, began, 50_000), "own", job).since(0)  # type: ignore[arg-type]
    assert [int(event["message"]) for event in events] == list(range(count))


def test_a_limit_of_the_service_is_said() -> None:
    job = {
        "JobId": "dlc1",
        "GmtCreateTime": "2026-09-21T14:13:20Z",
        "Pods": [{"PodId": "dlc1-master-0"}],
    }
    answers = Answers(10_001, 1_790_000_000_000, 50_000, most=2_000)
    *events, last = PodLogs(answers, "own", job).since(0)  # type: ignore[arg-type]
    assert [int(event["message"]) for event in events] == list(range(8_001, 10_001))
    assert "2000 lines of this second, perhaps not all" in last["message"]


def test_a_list_without_variables_knows_our_jobs_by_their_names(
    cloud: StandIn, raw: dict[str, Any]
) -> None:
    cloud.held = True
    job = smtrain.launch(raw, wait=False, say=quiet)
    cloud.jobs["other"] = StandInJob(
        "other", {"DisplayName": "someone-else"}, "2026-11-26T10:00:00Z"
    )
    for one in cloud.jobs.values():
        one.request.pop("Envs", None)
    assert [row["TrainingJobName"] for page in job.target.rows(None, 10) for row in page] == [
        job.name
    ]
    assert job.output == f"oss://bucket/smtrain/own/jobs/{job.name}/output/model/"


@pytest.mark.parametrize("etag", ["md5", "of parts"])
def test_a_changed_byte_in_oss_is_sent_again(
    cloud: StandIn,
    section: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    etag: str,
) -> None:
    """By the MD5 of objects in one piece, and by the CRC-64 of objects in parts or encrypted
    ones.
    """
    place, uri = PaiBackend(Pai(**section)), "oss://bucket/smtrain/inputs/text/0123/"
    if etag == "of parts":
        listing = place.cloud.listing
        monkeypatch.setattr(
            Cloud,
            "listing",
            lambda self, uri: [{**item, "ETag": '"0123-2"'} for item in listing(uri)],
        )
    (tmp_path / "a").write_bytes(b"abc" * 5000)
    place.put(uri, [("a", tmp_path / "a"), ("b", b"bytes")], quiet)
    stored = [cloud.root / "oss/bucket/smtrain/inputs/text/0123" / name for name in "ab"]
    right = [file.read_bytes() for file in stored]
    stored[0].write_bytes(b"abc" * 4999 + b"abd")
    times = [os.utime(file, (1, 1)) or file.stat().st_mtime_ns for file in stored]
    place.put(uri, [("a", tmp_path / "a"), ("b", b"bytes")], quiet)
    assert [file.read_bytes() for file in stored] == right
    assert [file.stat().st_mtime_ns == at for file, at in zip(stored, times, strict=True)] == [
        False,
        True,
    ]
