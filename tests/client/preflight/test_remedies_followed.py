"""Faults that `check` finds in an account: each way out that the remedy names ends that check
without a fault.

The remedies of the config's own checks are followed in
tests/client/config/test_remedies_followed.py. A way is a part of the remedy, and its change:
the config, the answers of AWS, or the objects in S3.
"""

from __future__ import annotations

import ast
import copy
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

import pytest

from smtrain.client import preflight
from smtrain.client.backends.sagemaker.backend import SageMakerBackend
from smtrain.client.launch.stages import Chain
from smtrain.client.planner.resolve import load_config
from smtrain.client.preflight.checks import CHECKS, run_checks
from smtrain.stages import stages_of
from tests import tiers
from tests.client.config.followed import OUT, WEIGHTS, Desk
from tests.client.preflight import test_check as checked
from tests.client.preflight.account import Account, Answer
from tests.client.preflight.test_check import (
    MANIFEST,
    aws,  # noqa: F401 - two are fixtures
    bucket,  # noqa: F401 - two are fixtures
    put,
    quota,
    role,
)

MLFLOW = "arn:aws:sagemaker:us-east-1:123456789012:mlflow-tracking-server/t"
APP = "arn:aws:sagemaker:us-east-1:123456789012:mlflow-app/app-1"


@dataclass
class State:
    """A config, the account that it is checked in, and a bucket of this test."""

    desk: Desk
    bucket: str
    answers: dict[str, Answer] = field(default_factory=dict)
    """Answers by service.Operation, in place of those in which nothing is wrong."""

    def faults(self, check: str) -> list[str]:
        """The faults of one check, each with its remedy."""
        config = load_config(self.desk.raw)
        account = Account(
            str(config.compute.region),
            {**checked.FINE, **self.answers},
            SageMakerBackend("local").s3,
        )
        report = run_checks(
            Chain(config, account), stages_of(config), [name for name in CHECKS if name != check]
        )
        return report.sentences("fault")


Change = Callable[[State], object]


def keys(values: dict[str, Any]) -> Change:
    """Set keys of the config; `BUCKET` stands for the bucket."""

    def do(state: State) -> None:
        for key, value in values.items():
            state.desk.do(
                {key: value.replace("BUCKET", state.bucket) if isinstance(value, str) else value}
            )

    return do


def says(**answers: Answer) -> Change:
    """Let AWS answer so, as service__Operation; OUT: as if nothing were wrong."""

    def do(state: State) -> None:
        for name, answer in answers.items():
            spelled = ".".join(name.replace("service_quotas", "service-quotas").rsplit("_", 1))
            state.answers.pop(spelled, None)
            if answer is not OUT:
                state.answers[spelled] = answer

    return do


def stored(prefix: str, files: dict[str, Any]) -> Change:
    return lambda state: put(f"s3://{state.bucket}/{prefix}", files)


def both(*changes: Change) -> Change:
    return lambda state: [change(state) for change in changes]


def model(*names: str) -> Change:
    """Store these files of a model."""

    def do(state: State) -> None:
        described = json.loads((state.desk.folder / "model/config.json").read_text())
        files = {"config.json": described, "model.safetensors": WEIGHTS, "tokenizer.json": {}}
        put(f"s3://{state.bucket}/model", {name: files[name] for name in names})

    return do


@dataclass(frozen=True)
class Case:
    """A check, what makes it fail, a part of the fault, and the ways out."""

    check: str
    broken: Change
    text: str
    ways: tuple[tuple[str, Change], ...]


def case(check: str, broken: Change, text: str, *ways: tuple[str, Change]) -> Case:
    return Case(check, broken, text, ways)


LOW = says(
    service_quotas_ListServiceQuotas=checked.listed(
        quota(f"{checked.TYPE} for training job usage", 1),
        quota(f"{checked.CPU} for training job usage", 1),
    )
)
HALF, WHOLE = {"a.safetensors": b"ab"}, {"a.safetensors": b"abc"}
CHECKPOINT = {"manifest.json": {"step": 10, "files": {"a.safetensors": {"size": 3}}}}
STEP = "smtrain/tiny/checkpoints/step_00000010"
PREPARED = both(keys({"data": {}}), keys({"data.prepared": "s3://BUCKET/data"}))
GOOD = {"tokens.bin": b"abcd", "manifest.json": MANIFEST}
BIG = keys(
    {
        "model.path": "s3://models/llama-2-70b",
        "parallel": {"tp": 8, "pp": 8},
        "compute.instance_count": 8,
        "compute.spot": True,
        "compute.max_run": "400h",
        "compute.max_wait": "500h",
        "train.seq_len": 4096,
        "train.global_batch_size": 512,
        "train.save_interval": 10**4,
        "train.steps": 10**5,
    }
)
REGISTRY = "763104351884.dkr.ecr.{}.amazonaws.com/x:y"
SMALL = {"tp": 2, "pp": 1, "sequence_parallel": True}
CASES = [
    case(
        "role",
        says(iam_GetRole="NoSuchEntity"),
        "there is no role training",
        ("create it", says(iam_GetRole=OUT)),
        (
            "or correct compute.role",
            both(
                keys({"compute.role": checked.OTHER_ROLE}),
                says(iam_GetRole=role(arn=checked.OTHER_ROLE)),
            ),
        ),
    ),
    case(
        "role",
        says(iam_GetRole=role(arn=checked.OTHER_ROLE)),
        "the role training is arn:aws:iam::123456789012:role/of/training",
        (
            f"compute.role says {checked.ROLE}; correct it",
            keys({"compute.role": checked.OTHER_ROLE}),
        ),
    ),
    case(
        "role",
        says(iam_GetRole=role({"Statement": []})),
        "does not trust sagemaker",
        ("give it the trust policy", says(iam_GetRole=OUT)),
    ),
    case(
        "permissions",
        says(iam_SimulatePrincipalPolicy=lambda g: checked.allowing(g, "s3:PutObject")),
        "the role may not s3:PutObject",
        ("give it the policy", says(iam_SimulatePrincipalPolicy=OUT)),
    ),
    case(
        "buckets",
        says(s3_HeadBucket="404"),
        "there is no bucket",
        ("create it", says(s3_HeadBucket=OUT)),
        ("or correct the URI", says(s3_HeadBucket={"BucketRegion": "us-east-1"})),
    ),
    case(
        "buckets",
        says(s3_HeadBucket={"BucketRegion": "eu-west-1"}),
        "is in eu-west-1, and the job runs in us-east-1",
        ("set compute.region", keys({"compute.region": "eu-west-1"})),
        ("or copy the data", says(s3_HeadBucket=OUT)),
    ),
    case(
        "quotas",
        both(LOW, keys({"parallel": "auto"})),
        "is 1, and this takes 2",
        ("lower compute.instance_count", keys({"compute.instance_count": 1})),
        ("or ask for more", says(service_quotas_ListServiceQuotas=OUT)),
    ),
    case(
        "hosts",
        keys({"compute.instance_type": "ml.trn1.2xlarge", "parallel": SMALL}),
        "has no EFA",
        ("set compute.instance_count: 1", keys({"compute.instance_count": 1})),
        ("or choose ml.trn1.32xlarge", keys({"compute.instance_type": "ml.trn1.32xlarge"})),
    ),
    case(
        "limits",
        keys({"tags": {"long": "x" * 257}}),
        "has 257 characters, 256 are allowed",
        ("shorten", keys({"tags": {"long": "x"}})),
        ("remove", keys({"tags": OUT})),
    ),
    case(
        "limits",
        keys({"compute.environment": {f"V{n}": "1" for n in range(120)}}),
        "entries, 100 are allowed",
        ("remove", keys({"compute.environment": OUT})),
    ),
    case(
        "image",
        keys({"compute.image": REGISTRY.format("eu-west-1")}),
        "is in eu-west-1, and the job runs in us-east-1",
        (
            "name the image of the job's region",
            keys({"compute.image": REGISTRY.format("us-east-1")}),
        ),
        ("or leave it out", keys({"compute.image": OUT})),
    ),
    case(
        "image",
        keys({"compute.image": "docker.io/library/python:3.12"}),
        "is not in Amazon ECR",
        (
            "push it to a repository of your account",
            keys({"compute.image": "123456789012.dkr.ecr.us-east-1.amazonaws.com/own:1"}),
        ),
        ("or leave it out", keys({"compute.image": OUT})),
    ),
    case(
        "image",
        says(ecr_BatchGetImage="RepositoryNotFoundException"),
        "there is no repository own",
        ("set compute.image to a copy in your own registry", says(ecr_BatchGetImage=OUT)),
    ),
    case(
        "image",
        says(ecr_BatchGetImage={"failures": [{"failureCode": "ImageNotFound"}]}),
        "is not there",
        ("leave it out", both(keys({"compute.image": OUT}), says(ecr_BatchGetImage=OUT))),
        ("correct it", says(ecr_BatchGetImage=OUT)),
    ),
    case(
        "token",
        both(
            keys({"model.path": "hf://a/b", "model.token": {"secret": "hub"}}),
            says(secretsmanager_DescribeSecret="ResourceNotFoundException"),
        ),
        "there is no secret hub",
        ("create it", says(secretsmanager_DescribeSecret={"Name": "hub"})),
        (
            "or correct model.token",
            both(
                keys({"model.token": {"secret": "hub2"}}),
                says(secretsmanager_DescribeSecret={"Name": "hub2"}),
            ),
        ),
    ),
    case(
        "tracker",
        both(
            keys({"track.mlflow": MLFLOW}),
            says(sagemaker_DescribeMlflowTrackingServer="ResourceNotFound"),
        ),
        "there is no MLflow tracking",
        (
            "correct track.mlflow",
            both(
                keys({"track.mlflow": APP}), says(sagemaker_DescribeMlflowApp={"Status": "Created"})
            ),
        ),
    ),
    case(
        "data",
        both(PREPARED, stored("data", {"tokens.bin": b"abcd"})),
        "is not a prepared dataset",
        ("prepare the text again", stored("data", GOOD)),
    ),
    case(
        "data",
        both(
            PREPARED, stored("data", {**GOOD, "manifest.json": {**MANIFEST, "format_version": 99}})
        ),
        "has format_version 99",
        ("prepare the text again", stored("data", GOOD)),
    ),
    case(
        "data",
        both(
            PREPARED, stored("data", {**GOOD, "manifest.json": {**MANIFEST, "documents": "many"}})
        ),
        "manifest.json is damaged (documents: ",
        ("prepare the text again", stored("data", GOOD)),
    ),
    case(
        "data",
        both(PREPARED, stored("data", {**GOOD, "tokens.bin": b"abc"})),
        "has 3 bytes, not 4",
        ("prepare the text again", stored("data", GOOD)),
    ),
    case(
        "inputs",
        keys({"data.path": "s3://BUCKET/text"}),
        "is empty",
        (
            "correct the URI",
            both(stored("other", {"a.jsonl": b"x"}), keys({"data.path": "s3://BUCKET/other"})),
        ),
        ("or upload what should be there", stored("text", {"a.jsonl": b"x"})),
    ),
    case(
        "inputs",
        both(
            keys({"data.path": "s3://BUCKET/text"}),
            stored("text", {"a.jsonl": b"x"}),
            stored("text-old", {"a.jsonl": b"x"}),
        ),
        "SageMaker reads all keys that begin like s3://",
        ("write s3://", keys({"data.path": "s3://BUCKET/text/"})),
    ),
    case(
        "inputs",
        both(
            keys({"data.path": "s3://BUCKET/text/a.jsonl"}),
            stored("text", {"a.jsonl": b"x", "a.jsonl.bak": b"x"}),
        ),
        "SageMaker reads all keys that begin like s3://",
        (
            "put it under a prefix without other data",
            both(
                stored("only", {"a.jsonl": b"x"}), keys({"data.path": "s3://BUCKET/only/a.jsonl"})
            ),
        ),
    ),
    case(
        "model",
        keys({"model.path": "s3://BUCKET/model"}),
        "holds no config.json",
        (
            "give the prefix of a Hugging Face model folder",
            model("config.json", "model.safetensors", "tokenizer.json"),
        ),
    ),
    case(
        "model",
        both(keys({"model.path": "s3://BUCKET/model"}), model("config.json", "tokenizer.json")),
        "holds no model.safetensors",
        ("or set model.init: scratch", keys({"model.init": "scratch"})),
        ("save the weights so", model("model.safetensors")),
    ),
    case(
        "disk",
        keys({"compute.volume_gb": 1}),
        "and the prepare job has 1 GB",
        ("set compute.volume_gb: 50", keys({"compute.volume_gb": 50})),
    ),
    case(
        "disk",
        keys({"checkpoint.keep": 10**8}),
        "which is more than",
        ("lower checkpoint.keep", keys({"checkpoint.keep": 3})),
    ),
    case(
        "memory",
        keys({"model.path": "s3://models/llama-2-13b", "parallel": SMALL}),
        "memory: a core of",
        ("raise tp", keys({"parallel": {"tp": 8, "pp": 2, "sequence_parallel": True}})),
        ("or pp", keys({"parallel": {"tp": 2, "pp": 8, "sequence_parallel": True}})),
        ("set parallel: auto", keys({"parallel": "auto"})),
    ),
    case(
        "memory",
        keys({"model.path": "s3://models/llama-2-70b", "parallel": SMALL}),
        "memory: a core of",
        (
            "take more machines (compute.instance_count) with parallel: auto",
            keys({"compute.instance_count": 8, "parallel": "auto"}),
        ),
        (
            "or a smaller model",
            keys({"model.path": "s3://models/llama-3.2-1b", "parallel": "auto"}),
        ),
    ),
    case(
        "time",
        keys(
            {
                "train.steps": 10**7,
                "train.seq_len": 256,
                "compute.max_run": 60,
                "train.save_interval": 10**6,
            }
        ),
        "ends before the first checkpoint",
        ("(train.save_interval)", keys({"train.save_interval": 2})),
        ("or raise compute.max_run", keys({"compute.max_run": "28d"})),
    ),
    case(
        "time",
        keys(
            {
                "train.steps": 10**7,
                "train.seq_len": 256,
                "compute.max_run": 1,
                "train.global_batch_size": 2**20,
            }
        ),
        "ends before the first checkpoint",
        ("raise compute.max_run", keys({"compute.max_run": "28d"})),
    ),
    case(
        "spot",
        keys({"compute.spot": True}),
        "no checkpoint falls before the last of 100 steps",
        ("save more often (train.save_interval)", keys({"train.save_interval": 10})),
        ("or set compute.spot: false", keys({"compute.spot": False})),
    ),
    case(
        "spot",
        keys({"compute.spot": True, "train.steps": 1}),
        "no checkpoint falls before the last of 1 steps",
        ("set compute.spot: false", keys({"compute.spot": False})),
    ),
    case(
        "spot",
        BIG,
        "would practically never end",
        ("save more often (train.save_interval)", keys({"train.save_interval": 10})),
        ("or set compute.spot: false", keys({"compute.spot": False, "compute.max_wait": OUT})),
    ),
    case(
        "price",
        keys({"train.steps": 10**8, "compute.price_limit": 1}),
        "above compute.price_limit",
        ("raise the limit", keys({"compute.price_limit": 10**9})),
    ),
    case(
        "resume",
        both(stored(STEP, {**CHECKPOINT, **WHOLE}), keys({"checkpoint.resume": False})),
        "checkpoint.resume is false",
        ("set it to true", keys({"checkpoint.resume": True})),
        ("or give the run another name", keys({"name": "other"})),
    ),
    case(
        "resume",
        both(stored(STEP, {**CHECKPOINT, **HALF}), keys({"checkpoint.resume": False})),
        "checkpoint.resume is false",
        ("give the run another name", keys({"name": "other"})),
    ),
    case(
        "resume",
        stored(STEP, {**CHECKPOINT, **HALF}),
        "found): step_00000010 lacks",
        ("or give the run another name", keys({"name": "other"})),
        ("restore the missing files", stored(STEP, WHOLE)),
    ),
    case(
        "stages",
        keys(
            {
                "model.path": "s3://models/llama-2-70b",
                "parallel": "auto",
                "compute.instance_count": 8,
                "compute.volume_gb": 1,
            }
        ),
        "stage convert writes 138 GB, and its disk has 1 GB",
        ("set compute.volume_gb: 200", keys({"compute.volume_gb": 200})),
    ),
]
OTHERWISE = {
    "{}": "said elsewhere: the config's checks, the planner, Docker; followed there",
    "what this run costs cannot be known, so compute.price_limit = ${} cannot be checked": (
        "a price of one's own"
    ),
    "you may not {}": "rights of the caller, which another person gives: test_other_commands.py",
    "{} needs {}, and no image of AWS has it": "a built image: test_check.py",
    "{} needs {}, which has no wheel for Python {}.{}": "the same",
    "{} has no {}, which {}": "the same: tests/tools/image",
    "{} has no {}, which {} needs": "the same",
    "{}: {}": "the API's own model; two are followed above",
    "{}, and {} has {} GiB": (
        "a stage whose type is named and too small: tests/client/planner/test_stages.py"
    ),
    "{}: {} holds no file of text that can be read": "refused before, as the config is loaded",
    "{} is quantized ({})": "a folder without a config: test_model_folder.py",
    "stage {} takes {} GiB of memory, and {} GiB are free here": (
        "a run on this machine: test_this_machine.py"
    ),
    "training runs {} on {} cores": "the same",
}
"""Faults that are not followed here, and why."""


@pytest.fixture
def state(aws: dict[str, Any], bucket: str, tmp_path: Path) -> State:  # noqa: F811
    return State(Desk(tmp_path, copy.deepcopy(aws)), bucket)


@pytest.mark.parametrize(
    "one",
    tiers.gate(CASES, [one.check for one in CASES], 0),  # one of each check
    ids=[f"{one.check}: {one.text}" for one in CASES],
)
def test_every_way_that_a_remedy_names_is_enough(one: Case, state: State) -> None:
    assert state.faults(one.check) == []
    one.broken(state)
    (sentence,) = [fault for fault in state.faults(one.check) if one.text in fault][:1]
    raw, answers = copy.deepcopy(state.desk.raw), dict(state.answers)
    for words, change in one.ways:
        assert words in sentence
        state.desk.raw, state.answers = copy.deepcopy(raw), dict(answers)
        change(state)
        assert state.faults(one.check) == [], words


def test_every_fault_of_the_checks_is_followed_or_says_why_not() -> None:
    """Faults are found in the source, so that a new one without a case fails here; those of Slurm
    and PAI-DLC are followed with their backends.
    """
    texts = {
        text
        for path in Path(preflight.__file__).parent.glob("*.py")
        for text in faults_in(path.read_text())
    }
    assert len(texts) > 35
    assert texts >= OTHERWISE.keys()
    lacking = [
        text for text in texts - OTHERWISE.keys() if not any(alike(text, one.text) for one in CASES)
    ]
    assert lacking == [], "\n".join(sorted(lacking))


def alike(template: str, part: str) -> bool:
    """Whether a part of a sentence is probably one of this template: they share eight letters in a
    row.
    """
    return SequenceMatcher(None, template, part, autojunk=False).find_longest_match().size >= 8


def faults_in(source: str) -> Iterator[str]:
    """The texts of the findings that are made as faults, each value in them as `{}`."""
    for node in ast.walk(ast.parse(source)):
        if not (
            isinstance(node, ast.Call)
            and getattr(node.func, "id", "") == "Finding"
            and len(node.args) > 2
        ):
            continue
        level, text = node.args[1], node.args[2]
        if "fault" in ast.unparse(level):
            parts = text.values if isinstance(text, ast.JoinedStr) else [text]
            yield "".join(
                str(part.value) if isinstance(part, ast.Constant) else "{}" for part in parts
            )
