"""The host and rank that failed first, its traceback, and the known causes of real messages."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from smtrain.client.follow.error_blocks import blocks_of
from smtrain.client.follow.failure import causes, explain
from smtrain.core.facts import table
from smtrain.core.protocol.log_lines import Line

from .cloudwatch import description

# ruff: noqa: E501 - log lines are as long as they are


T = 1_795_262_400_000


def lines(text: str, host: str = "algo-1", at: int = 0) -> list[Line]:
    """A host's output, one line a millisecond."""
    return [Line(host, T + at + i, line) for i, line in enumerate(text.strip("\n").split("\n"))]


def merged(*parts: list[Line]) -> list[Line]:
    return sorted((line for part in parts for line in part), key=lambda line: line.timestamp)


def failed(reason: str | None = None, secondary: str = "Failed", **more: Any) -> dict[str, Any]:
    words: dict[str, Any] = {"FailureReason": reason} if reason else {}
    return description(
        "Failed", "Starting", "Training", "Failed", secondary=secondary, **words, **more
    )


GLOO = """
[rank{r}]: Traceback (most recent call last):
[rank{r}]:   File "/opt/ml/input/data/code/smtrain/worker/train/loop.py", line 71, in train
[rank{r}]:     result = engine.step(*loader.batch(samples), lr)
[rank{r}]:   File "/usr/lib/python3/dist-packages/torch/distributed/distributed_c10d.py", line 2770, in all_reduce
[rank{r}]: RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.1.7]:41219
"""
OWN = """
[rank{r}]: Traceback (most recent call last):
[rank{r}]:   File "/opt/ml/input/data/code/smtrain/worker/data/load/loader.py", line 88, in batch
[rank{r}]:     row = self.index[sample]
[rank{r}]:            ~~~~~~~~~~^^^^^^^^
[rank{r}]: IndexError: index 40961 is out of bounds for axis 0 with size 40960
algo-2, rank {r}: IndexError: index 40961 is out of bounds for axis 0 with size 40960
"""
TORCHRUN = """
W1121 12:00:04.120000 77 torch/distributed/elastic/multiprocessing/api.py:900] Sending process 91 closing signal SIGTERM
E1121 12:00:05.000000 77 torch/distributed/elastic/multiprocessing/api.py:874] failed (exitcode: {code}) local_rank: 1 (pid: 92) of binary: /opt/conda/bin/python
Traceback (most recent call last):
  File "/opt/conda/lib/python3.12/runpy.py", line 198, in _run_module_as_main
    return _run_code(code, main_globals, None,
  File "/opt/conda/lib/python3.12/site-packages/torch/distributed/launcher/api.py", line 277, in launch_agent
    raise ChildFailedError(
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
/opt/ml/input/data/code/entrypoints/train.py FAILED
------------------------------------------------------------
Failures:
  <NO_OTHER_FAILURES>
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-11-21_12:00:05
  host      : {host}
  rank      : {rank} (local_rank: 1)
  exitcode  : {code} (pid: 92)
  error_file: <N/A>
  traceback : {trace}
============================================================
"""


def torchrun(host: str, rank: int, code: int, at: int) -> list[Line]:
    trace = (
        f"Signal {-code} (SIGKILL) received by PID 92"
        if code < 0
        else "To enable traceback see: https://pytorch.org"
    )
    return lines(TORCHRUN.format(host=host, rank=rank, code=code, trace=trace), host, at)


def test_the_first_rank_is_the_one_that_the_others_died_of() -> None:
    """Rank 5 fails; two others print their broken connections before and after, every torchrun sums
    up.
    """
    log = merged(
        lines(GLOO.format(r=2), "algo-1", at=90),
        lines(OWN.format(r=5), "algo-2", at=100),
        lines(GLOO.format(r=4), "algo-2", at=101),  # line by line between those of rank 5
        torchrun("algo-1", 2, 1, at=3000),
        torchrun("algo-2", 5, 1, at=2500),
    )
    why = explain(
        "job",
        failed(
            "AlgorithmError: algo-1, rank 2: RuntimeError: Connection closed by peer, exit code: 1"
        ),
        log,
    )
    assert (why.host, why.rank, why.exit_code) == ("algo-2", 5, 1)
    assert why.error[0] == "Traceback (most recent call last):"
    assert why.error[-1] == "IndexError: index 40961 is out of bounds for axis 0 with size 40960"
    assert len(why.error) == 5
    assert "job ended as Failed, first on algo-2, rank 5 at " in str(why)
    assert "SageMaker says: AlgorithmError: algo-1, rank 2" in str(why)


def test_a_process_that_was_killed_says_nothing_but_torchrun_does() -> None:
    log = merged(
        lines(GLOO.format(r=0), "algo-1", at=10),
        torchrun("algo-1", 0, 1, at=2000),
        torchrun("algo-2", 3, -9, at=2100),
    )
    why = explain("job", failed("AlgorithmError: , exit code: 1"), log)
    assert (why.host, why.rank) == ("algo-2", 3)
    assert why.cause
    assert why.cause.name == "host-memory"


def test_where_all_lost_their_connection_the_earliest_is_shown() -> None:
    log = merged(lines(GLOO.format(r=3), "algo-2", at=40), lines(GLOO.format(r=1), "algo-1", at=20))
    why = explain("job", failed("AlgorithmError: , exit code: 1"), log)
    assert (why.host, why.rank) == ("algo-1", 1)


def test_a_traceback_without_a_mark_gets_its_rank_from_the_last_words() -> None:
    text = """
Traceback (most recent call last):
  File "train.py", line 1, in f
    raise KeyError("a") from None
KeyError: 'a'

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "train.py", line 9, in <module>
    main()
step=4 loss=3.2 grad_norm=0.5 of=10
ValueError: bad batch
algo-1, rank 7: ValueError: bad batch
"""
    why = explain("job", failed(), lines(text))
    assert why.rank == 7
    assert why.error[3] == "KeyError: 'a'"
    assert why.error[-1] == "ValueError: bad batch"
    assert not any("step=4" in line for line in why.error)


def test_a_sentence_of_ours_is_an_error_without_a_traceback() -> None:
    log = lines("reading\nalgo-1: a.jsonl, line 2: is not JSON (Expecting value); mend it\nbye")
    why = explain(
        "job", failed("AlgorithmError: algo-1: a.jsonl, line 2: is not JSON, exit code: 1"), log
    )
    assert why.error == ("a.jsonl, line 2: is not JSON (Expecting value); mend it",)
    assert why.rank is None


def test_long_tracebacks_are_cut_in_the_middle() -> None:
    frames = "\n".join(f'  File "f.py", line {i}, in g' for i in range(200))
    why = explain(
        "job",
        failed(),
        lines(f"Traceback (most recent call last):\n{frames}\nRecursionError: too deep"),
    )
    assert len(str(why).splitlines()) < 50
    assert "RecursionError: too deep" in str(why)
    assert "... 162 lines ..." in str(why)


def test_what_has_not_failed_is_not_explained() -> None:
    why = explain("job", description("Completed", "Training", "Completed"), [])
    assert not why.has_failed
    assert str(why) == "job: Completed, nothing failed"
    stopped = explain(
        "job", description("Stopped", "Training", "Stopped"), lines("KeyError: 'not asked for'")
    )
    assert str(stopped).endswith("to do: the same command resumes from its last save")
    assert (stopped.has_failed, stopped.cause) == (True, None)


# Failures of users of current tools, in the words of their logs or of SageMaker:
# ../shared/facts/users.md.
LOGS = {
    "no-deterministic-kernel": (
        "[rank0]: RuntimeError: put_ does not have a deterministic implementation, but you set"
        " 'torch.use_deterministic_algorithms(True)'. You can turn off determinism just for this"
        " operation"
    ),
    "gpu-memory": (
        "algo-1, rank 3: out of memory: 2.50 GiB were asked for, and 1.12 of 79.10 GiB were free on"
        " GPU 3; raise"
    ),
    "neuron-memory": (
        """
2026-Nov-21 12:01:17.728750  3882:3882  ERROR  TDRV:dmem_alloc_internal          Failed to alloc DEVICE memory: 180355072
2026-Nov-21 12:01:18.347720  3882:3882  ERROR  TDRV:log_dev_mem                  Failed to allocate 172.000MB (usage: tensors) on ND 0:NC 0, current utilization:
[rank3]: Traceback (most recent call last):
[rank3]:   File "/opt/ml/input/data/code/smtrain/worker/train/loop.py", line 71, in train
[rank3]: RuntimeError: nrt_tensor_allocate status=4 message="Allocation Failure"
"""
    ),
    "torus": (
        "RuntimeError: failed to init a collective algorithm for 16 ranks: no_hier no_mesh no_ring"
    ),
    "integer-collective": (
        "[rank0]: RuntimeError: neuronx-cc failed with 70: [NCC_EVRF061] all-reduce of int64 is not"
        " supported"
    ),
    "neuron-graph": (
        "torch._dynamo.exc.BackendCompilerFailed: backend='neuron' raised:\nRuntimeError:"
        " neuronx-cc failed with 70"
    ),
    "host-collectives": (
        "2026-Sep-02 10:11:12.0001  99:99  ERROR  NRT:  device barrier: timed out after 120 s"
    ),
    "compiler-killed": (
        """
2026-11-21 12:00:40.000613:  1201  ERROR ||NEURON_CC_WRAPPER||: Failed compilation with ['neuronx-cc', 'compile', '--target=trn1', '--model-type', 'transformer']: [F137] neuronx-cc was forcibly killed - This most commonly occurs due to insufficient system memory.
"""
    ),
    "compiler-too-large": (
        """
ERROR 25614 [neuronx-cc]: Compiler generated too many instructions (6888787). This maybe due to a failure in parallelism extraction by the tensorizer.
[rank0]: Traceback (most recent call last):
[rank0]: RuntimeError: neuronx-cc failed with 70
"""
    ),
    "compiler": (
        """
ERROR:Neuron:neuronx-cc failed with 70
[rank0]: Traceback (most recent call last):
[rank0]:   File "libneuronxla/neuron_cc_wrapper.py", line 180, in neuron_xla_compile
[rank0]: RuntimeError: Failed compilation with ['neuronx-cc', 'compile']: neuronx-cc exited with code 70
"""
    ),
    "driver-old": (
        """
2026-Nov-21 12:17:54.0589  8816:8816  ERROR   NRT:nrt_init   This Neuron Runtime (compatibility id: 6) is not compatible with the installed aws-neuronx-dkms package.
2026-Nov-21 12:17:54.0589  8816:8816  ERROR   NRT:nrt_init   Please make sure to upgrade to latest aws-neuronx-dkms
Traceback (most recent call last):
RuntimeError: The PyTorch Neuron Runtime could not be initialized. Neuron Driver issues are logged to your system logs.
"""
    ),
    "no-neuron-device": (
        """
2026-Nov-21 12:19:58.0646    28:28    ERROR   NRT:nrt_init    Unable to read compatible Driver version.
2026-Nov-21 12:19:58.0646    28:28    ERROR   NRT:nrt_init    Please check /dev/neuron# is accessible. If you're using containers, please ensure Neuron Devices are passed to the container
"""
    ),
    "efa": (
        """
2026-Nov-21 12:14:20.0020 58091:58701 [0] nccl_net_ofi_init:1415 CCOM WARN NET/OFI aws-ofi-nccl initialization failed
2026-Nov-21 12:14:20.0020 58091:58701 [0] init.cc:137 CCOM WARN OFI plugin initNet() failed is EFA enabled?
2026-Nov-21 12:16:20.0121 58091:58701 [0] include/socket.h:541 CCOM WARN Timeout waiting for RX (waited 120 sec) - retrying
"""
    ),
    "collective-hang": (
        """
2026-Nov-21 12:16:20.0229 58091:59050 [-1] bootstrap.cc:95 CCOM WARN Timeout waiting for incoming connection (waited 120 sec), [CommInitRankDev/-4]
2026-Nov-21 12:26:20.0229 58091:59050 ERROR  NRT:nrt_execute  NRT_TIMEOUT
"""
    ),
    "nan": (
        """
algo-1, rank 0: train.lr: loss nan and grad norm nan at step 812, samples 415232 to 415743; lower the learning rate or look at these samples, the run goes on from its last checkpoint
"""
    ),
    "loss-exploded": (
        """
algo-1, rank 0: train.lr: the loss exploded to 48.2 (usually 3.1) at steps 90 to 99, samples 46080 to 51199; lower the learning rate or look at these samples, the run goes on from its last checkpoint
"""
    ),
    "stall": (
        """
no step after step 41; where this rank stands:
Thread 0x00007f2d (most recent call first):
  File "/usr/lib/python3/dist-packages/torch/distributed/distributed_c10d.py", line 2770 in all_reduce
algo-2, rank 6: train.stall_minutes: nothing was done for 10 minutes after step 41; the log says where each rank stands, the run goes on from its last checkpoint
"""
    ),
    "disk-full": (
        """
[rank1]: Traceback (most recent call last):
[rank1]:   File "/opt/ml/input/data/code/smtrain/worker/checkpoint/native/writer.py", line 61, in write
[rank1]: OSError: [Errno 28] No space left on device
"""
    ),
    "library-missing": (
        """
Traceback (most recent call last):
  File "/opt/ml/input/data/code/entrypoints/train.py", line 9, in <module>
ModuleNotFoundError: No module named 'neuronx_distributed'
"""
    ),
}
# FailureReason, as CreateTrainingJob's or the platform's own words.
REASONS = {
    "host-memory": "AlgorithmError: , exit code: 137",
    "s3-denied": (
        "ClientError: Data download failed:AccessDenied (403): User"
        " arn:aws:sts::123456789012:assumed-role/r is not authorized to perform: s3:GetObject"
    ),
    "data-missing": (
        "ClientError: Data download failed:NoSuchKey (404): s3://bucket/run/prepare/tokens.bin"
    ),
    "artifact-upload": (
        "ClientError: Artifact upload failed:Error 7: The credentials received have been expired"
    ),
    "image-pull": (
        "ClientError: Cannot pull algorithm container. Either the image does not exist or its"
        " permissions are incorrect."
    ),
    "role-assume": (
        "Could not assume role arn:aws:iam::123456789012:role/train. Please ensure that the role"
        " exists and allows principal 'sagemaker.amazonaws.com' to assume the role."
    ),
    "vpc": (
        "ClientError: subnet subnet-0a1b does not have enough free addresses:"
        " InsufficientFreeAddressesInSubnet"
    ),
    "spot": "InternalServerError: the Spot interruption could not be recovered from",
    "max-wait": "MaxWaitTimeInSeconds was reached before spot capacity came",
    "capacity": (
        "CapacityError: Unable to provision requested ML compute capacity. Please retry using a"
        " different ML instance type."
    ),
    "quota": (
        "ResourceLimitExceeded: The account-level service limit 'ml.trn1.32xlarge for training job"
        " usage' is 0 Instances, with current utilization of 0 Instances and a request delta of 4"
        " Instances."
    ),
    "warm-pool": "ClientError: the warm pool of this job was terminated",
    "max-runtime": "Training job runtime exceeded MaxRuntimeInSeconds provided",
    "max-pending": "ClientError: the pending time of the job exceeded MaxPendingTimeInSeconds",
    "local-disk": (
        "ClientError: no space left on /home/me/.smtrain (SMTRAIN_HOME): free some (`smtrain local"
        " clean` says what can go), then run the same command again"
    ),
    "damaged-code": "AlgorithmError: tar: Error is not recoverable: exiting now, exit code: 2",
    "local-end": "InternalServerError: the local control plane was restarted while the job ran",
    "internal": "InternalServerError: We encountered an internal error. Please try again.",
}


def test_every_row_of_the_table_is_tried_here_and_complete() -> None:
    assert {cause.name for cause in causes()} == {*LOGS, *REASONS}
    for cause in causes():
        assert cause.cause
        assert cause.do
        assert cause.source
        re.compile(cause.pattern)
    assert table("failures")["date"]


@pytest.mark.parametrize("name", LOGS)
def test_a_known_message_in_the_log_finds_its_cause(name: str) -> None:
    log = merged(
        lines("step=1 loss=3.0 grad_norm=1.0 lr=1e-4 tokens_per_s=10 mfu=0.4 of=10", "algo-1"),
        lines(LOGS[name], "algo-2", at=5),
        lines(GLOO.format(r=0), "algo-1", at=900),
        torchrun("algo-1", 0, 1, at=4000),
    )
    why = explain(
        "job", failed("AlgorithmError: ExecuteUserScriptError: ExitCode 1, exit code: 1"), log
    )
    assert why.cause
    assert why.cause.name == name
    assert f"cause: {why.cause.cause}\nto do: {why.cause.do}" in str(why)


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (
            (
                "ClientError: User is not authorized to perform: kms:GenerateDataKey on resource:"
                " arn:aws:kms:x"
            ),
            "s3-denied",
        ),
        (
            (
                "Error: Data download failed:Please ensure that the subnet's route table has an S3"
                " VPC endpoint"
            ),
            "vpc",
        ),
        ("ERROR: No matching distribution found for gigatoken>=0.10", "library-missing"),
        (
            "RuntimeError: NRT EXECUTION FAILED: Neuron OOM: requested_size = 268435456",
            "neuron-memory",
        ),
        (
            (
                "algo-1, rank 0: no space left on /opt/ml/checkpoints/step_4: free some, then run"
                " the same"
            ),
            "disk-full",
        ),
        (
            (
                "algo-1, rank 0: the disk quota is used up at /opt/ml/checkpoints: free some, then"
                " run the same"
            ),
            "disk-full",
        ),
    ],
)
def test_other_words_for_it_find_the_cause_too(words: str, name: str) -> None:
    why = explain("job", failed("AlgorithmError: , exit code: 1"), lines(words))
    assert why.cause
    assert why.cause.name == name


@pytest.mark.parametrize(
    ("reason", "name"),
    [
        (
            "AlgorithmError: /usr/bin/python3 has no pyarrow>=15, which stage prepare needs; build",
            "library-missing",
        ),
        (
            (
                "InternalServerError: the process that ran host algo-2 ended with SIGKILL; all that"
                " it had"
            ),
            "local-end",
        ),
        (
            (
                "ClientError: Artifact upload failed: the disk quota is used up at /h"
                " (SMTRAIN_HOME): free"
            ),
            "local-disk",
        ),
    ],
)
def test_other_words_of_a_reason_find_the_cause_too(reason: str, name: str) -> None:
    why = explain("job", failed(reason), [])
    assert why.cause
    assert why.cause.name == name


@pytest.mark.parametrize("name", REASONS)
def test_a_known_reason_finds_its_cause(name: str) -> None:
    why = explain("job", failed(REASONS[name]), [])
    assert why.cause
    assert why.cause.name == name
    assert REASONS[name] in str(why)


@pytest.mark.parametrize(
    ("secondary", "name"),
    [
        ("MaxRuntimeExceeded", "max-runtime"),
        ("MaxWaitTimeExceeded", "max-wait"),
        ("Interrupted", "spot"),
    ],
)
def test_some_secondary_statuses_say_it_all(secondary: str, name: str) -> None:
    why = explain("job", description("Stopped", "Training", secondary, secondary=secondary), [])
    assert why.cause
    assert why.cause.name == name
    assert f"job ended as Stopped ({secondary})" in str(why)


def test_ordinary_lines_are_no_cause() -> None:
    log = lines(
        "reading AccessDenied.md from the corpus\nImportError is a word of the text\nalgo-1 is here"
    )
    why = explain(
        "job", failed("AlgorithmError: , exit code: 3"), [x for x in log if "rror" not in x.text]
    )
    assert why.cause is None
    assert (why.host, why.exit_code) == (None, 3)
    assert blocks_of(lines("Traceback (most recent call last) is what Python prints")) != []


PAGE = Path(__file__).resolve().parents[3] / "docs/troubleshooting.md"


def test_the_documented_causes_are_those_in_use() -> None:
    rows = [
        f"| {cause.cause} | {cause.do} |".replace("<type>", "&lt;type&gt;") for cause in causes()
    ]
    assert "\n".join(["|---|---|", *rows, ""]) in PAGE.read_text("utf-8")


def test_a_missing_library_on_slurm_is_told_without_an_image_of_sagemaker() -> None:
    log = merged(lines(LOGS["library-missing"], "node-1"))
    described = {**failed("ExitCode 1"), "TrainingJobArn": "slurm:job"}
    why = explain("job", described, log).cause
    assert why is not None
    assert why.name == "library-missing"
    assert "compute.image" not in why.do
    assert "cluster.venv" in why.do
    aws = explain("job", failed("ExitCode 1"), log).cause
    assert aws is not None
    assert "compute.image" in aws.do
