"""A plain config for trn2 becomes a whole request; a wrong image, Python, Neuron release or LNC is
refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from botocore.session import Session
from botocore.validate import ParamValidator

import smtrain
from smtrain.cli.dispatch import call as dispatched
from smtrain.client.launch.image_pattern import newest, resolve_image
from smtrain.client.launch.request import image_of
from smtrain.core.errors import ConfigError
from smtrain.core.facts import table
from smtrain.core.facts.image_fit import image_fault
from smtrain.core.facts.images import image_rows, known_image, python_of
from tests.client.preflight.account import Account
from tests.client.sdk.conftest import ROLE
from tests.client.sdk.wire import canonical, sent

TRN2, TRN1 = "ml.trn2.48xlarge", "ml.trn1.32xlarge"
TAG = "2.14.0-neuronx-py314-sdk2.33.0-ubuntu26.04"
REGISTRY = "763104351884.dkr.ecr.us-west-2.amazonaws.com"
FIVE_LINES = f"""\
target: aws
model: {{path: s3://bucket/qwen3-8b}}
data: {{path: s3://bucket/text}}
compute: {{instance_type: {TRN2}, region: us-west-2, role: {ROLE}}}
output: {{s3_uri: s3://bucket/out}}
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(FIVE_LINES)
    return path


def call(*words: str) -> int:
    """The exit status of a command of smtrain."""
    return dispatched(words[0], f"smtrain.cli.{words[0]}", [*words[1:]])


def validated(request: Mapping[str, Any]) -> str:
    """The faults that botocore finds in a request by SageMaker's own model."""
    shape: Any = (
        Session().get_service_model("sagemaker").operation_model("CreateTrainingJob").input_shape
    )
    return str(ParamValidator().validate(request, shape).generate_report())


@pytest.mark.parametrize(
    "image", [TAG, f"pytorch-training-neuronx:{TAG}", "2.14.0-neuronx-py314-sdk2.33.*"]
)
def test_five_lines_and_an_image_make_a_whole_request(config: Path, image: str) -> None:
    request = smtrain.request(config, set_=[f"compute.image={image}"])
    made = request["AlgorithmSpecification"]["TrainingImage"]
    assert made == f"{REGISTRY}/pytorch-training-neuronx:{image.rpartition(':')[2]}"
    assert request["ResourceConfig"]["InstanceType"] == TRN2
    assert request["HyperParameters"]["processes_per_instance"] == "64"
    assert request["Environment"]["NEURON_LOGICAL_NC_CONFIG"] == "2"
    assert validated(request) == ""
    assert canonical(sent(request).bodies[0]) == canonical(request), (
        "through the SDK of this environment"
    )
    shape = Session().get_service_model("sagemaker").shape_for("TrainingInstanceType")
    assert TRN2 in shape.metadata["enum"]


def test_without_an_image_one_line_says_what_to_look_for_and_its_command_is_enough(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        smtrain.request(config)
    (told,) = caught.value.faults
    assert "gallery.ecr.aws/neuron" in told
    assert "unverified" in told
    command = told.partition("`smtrain ")[2].partition("`")[0].replace("CONFIG", str(config))
    before = config.read_text()
    assert call(*command.split()) == 0
    assert capsys.readouterr().out == f"wrote compute.image into {config}\n"
    assert config.read_text() == before.replace(f"{ROLE}}}", f"{ROLE}, image: {TAG}}}")
    assert validated(smtrain.request(config)) == ""


def test_one_line_in_the_table_makes_the_image_the_default(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert known_image("native") is None
    monkeypatch.setitem(table("images")["engines"]["native"], "seen", "2026-12-01")
    request = smtrain.request(config)
    assert (
        request["AlgorithmSpecification"]["TrainingImage"]
        == f"{REGISTRY}/pytorch-training-neuronx:{TAG}"
    )
    assert image_rows()[0] == {
        "tag": TAG,
        "sdk": "2.33.0",
        "note": "seen 2026-12-01",
        "engines": ["native"],
    }
    assert "leave it out for the newest known one" in str(
        image_fault(f"x:{TAG.replace('2.33', '2.32')}", "native", TRN2)
    )


REFUSED = [
    (
        "pytorch-training-neuronx:2.9.0-neuronx-py312-sdk2.30.0-ubuntu24.04",
        TRN2,
        "has Neuron 2.30.0, and engine native",
    ),
    (
        "pytorch-training-neuronx:2.12.0-neuronx-py312-sdk2.32.0-ubuntu24.04",
        TRN2,
        "has Neuron 2.32.0, and engine native",
    ),
    (
        "pytorch-training-neuronx:2.9.0-neuronx-py312-sdk2.33.0-ubuntu24.04",
        TRN2,
        "has torch 2.9.0, and engine native",
    ),
    (
        f"pytorch-training-neuronx:{TAG.replace('py314', 'py311')}",
        TRN2,
        "has Python 3.11, and TorchNeuron has only",
    ),
    (
        f"pytorch-training-neuronx:{TAG.replace('py314', 'py315')}",
        TRN2,
        "has Python 3.15, and smtrain runs on",
    ),
    (
        f"pytorch-training-neuronx:{TAG.replace('py314', 'py39')}",
        TRN2,
        "has Python 3.9, and smtrain runs on",
    ),
    (f"pytorch-training-neuronx:{TAG}", TRN1, "has Neuron 2.33.0, and engine nxd needs"),
    (
        "pytorch-training-neuronx:2.9.0-neuronx-py312-sdk2.32.0-ubuntu24.04",
        TRN1,
        "has Neuron 2.32.0, and engine nxd",
    ),
    (f"pytorch-inference-neuronx:{TAG}", TRN2, "serves models (pytorch-inference-neuronx)"),
    (
        "pytorch-inference-vllm-neuronx:0.29.0.1.2.0-neuronx-py314-sdk2.33.0-ubuntu26.04",
        TRN2,
        "serves models",
    ),
    ("vllm:0.30.0-gpu-py312-cu130-ubuntu24.04-sagemaker", "ml.p5.48xlarge", "serves models (vllm)"),
    (
        "pytorch-training:2.10.0-gpu-py313-cu130-ubuntu22.04-sagemaker",
        TRN2,
        "is for GPUs, and ml.trn2",
    ),
    ("pytorch:2.14.0-cu133-amzn2023-sagemaker", TRN2, "is for GPUs, and ml.trn2"),
    ("pytorch-training:2.10.0-cpu-py313-ubuntu22.04-sagemaker", TRN2, "is for CPUs, and ml.trn2"),
    (
        "pytorch-training:2.10.0-cpu-py313-ubuntu22.04-sagemaker",
        "ml.p5.48xlarge",
        "is for CPUs, and ml.p5",
    ),
    (f"pytorch-training-neuronx:{TAG}", "ml.p5.48xlarge", "is for Neuron cores, and ml.p5"),
    ("pytorch-training-neuronx:2.14.*", TRN2, "does not fix a release of Neuron"),
    ("pytorch-*-neuronx:2.14.0-neuronx-py314-sdk2.33.*", TRN2, "* in the tag only"),
    (
        "pytorch-training-neuronx:2.9.0-neuronx-py312-sdk2.30.*",
        TRN2,
        "has Neuron 2.30.0, and engine native",
    ),
]


@pytest.mark.parametrize(("image", "kind", "fault"), REFUSED)
@pytest.mark.parametrize(
    "place", ["", f"{REGISTRY}/", "123456789012.dkr.ecr.us-west-2.amazonaws.com/team/"]
)
def test_a_wrong_image_is_refused_in_one_sentence_before_anything_is_sent(
    config: Path, image: str, kind: str, fault: str, place: str
) -> None:
    changed = [f"compute.image={place}{image}", f"compute.instance_type={kind}"]
    report = smtrain.check(config, set_=changed)
    (told,) = report.faults
    assert fault in told.text
    assert told.text.startswith("compute.image: ")
    with pytest.raises(ConfigError) as caught:
        smtrain.request(config, set_=changed)
    assert caught.value.faults == [told.text]


@pytest.mark.parametrize(
    ("image", "kind", "_"), [row for row in REFUSED if row[1] == TRN2 and "*" not in row[0]]
)
def test_the_remedy_of_a_wrong_image_leads_to_a_request(
    config: Path, image: str, kind: str, _: str
) -> None:
    config.write_text(FIVE_LINES.replace(f"{ROLE}}}", f"{ROLE}, image: '{REGISTRY}/{image}'}}"))
    (told,) = smtrain.check(config).faults
    command = told.text.partition("`smtrain ")[2].partition("`")[0].replace("CONFIG", str(config))
    assert call(*command.split()) == 0
    assert validated(smtrain.request(config)) == ""


def test_a_fallback_type_must_suit_the_image_too(config: Path) -> None:
    set_ = [
        f"compute.image={TAG}",
        "parallel.tp=1",
        "parallel.dp=8",
        "compute.processes_per_instance=8",
    ]
    (told,) = smtrain.check(
        config, set_=[*set_, "compute.fallback_instance_types=[ml.p5.48xlarge]"]
    ).faults
    assert (
        told.text
        == "compute.fallback_instance_types: ml.p5.48xlarge cannot take this job: this image is for"
        " Neuron cores, and ml.p5.48xlarge has GPUs; leave it out"
    )


def test_an_image_of_the_public_gallery_is_copied_first(config: Path) -> None:
    uri = f"public.ecr.aws/neuron/pytorch-training-neuronx:{TAG}"
    (told,) = smtrain.check(config, set_=[f"compute.image={uri}"]).faults
    assert f"`smtrain image build CONFIG --from {uri} --push URI`" in told.text
    for own in (
        f"mine:{TAG}",
        "training-and-inference:1",
        "llm-serving:24.05-py3",
        f"team/vllmish@sha256:{'0' * 64}",
    ):
        assert (
            image_fault(f"123456789012.dkr.ecr.us-west-2.amazonaws.com/{own}", "native", TRN2)
            is None
        ), own


class TestPatterns:
    """The registry decides; a pattern is never filled in without it."""

    pattern = "2.14.0-neuronx-py314-sdk2.33.*"

    def account(self, answer: Any) -> Account:
        return Account("us-west-2", {"ecr.ListImages": answer}, None)

    def test_the_newest_tag_that_matches_is_taken_and_told(self, config: Path) -> None:
        tags = [
            TAG,
            TAG.replace("2.33.0", "2.33.10"),
            TAG.replace("2.33.0", "2.33.9"),
            TAG.replace("2.33.0", "2.34.0"),
        ]
        account = self.account(
            {
                "imageIds": (
                    [{"imageTag": tag} for tag in tags] + [{"imageDigest": "sha256:" + "0" * 64}]
                )
            }
        )
        loaded = smtrain.load_config(config, set_=[f"compute.image={self.pattern}"])
        whole, told = resolve_image(loaded, account)
        assert image_of(whole).endswith(
            f"/pytorch-training-neuronx:{TAG.replace('2.33.0', '2.33.10')}"
        )
        assert told is not None
        assert told.endswith(
            "is 2.14.0-neuronx-py314-sdk2.33.10-ubuntu26.04, the newest of 3 tags that match"
        )
        assert account.asked[0][1]["registryId"] == "763104351884"

    @pytest.mark.parametrize(
        ("answer", "sentence"),
        [
            (
                "AccessDeniedException",
                r"cannot be asked .*\(AccessDeniedException\).*ecr:ListImages",
            ),
            (
                {"imageIds": [{"imageTag": "2.9.0-neuronx-py312-sdk2.30.0-ubuntu24.04"}]},
                "has 1 tags, and .* matches no one",
            ),
        ],
    )
    def test_what_the_registry_does_not_say_is_not_guessed(
        self, config: Path, answer: Any, sentence: str
    ) -> None:
        loaded = smtrain.load_config(config, set_=[f"compute.image={self.pattern}"])
        with pytest.raises(ConfigError, match=sentence):
            resolve_image(loaded, self.account(answer))
        with pytest.raises(ConfigError, match="only Amazon ECR is asked"):
            newest(None, "docker.io/team/neuronx:sdk2.33.*")

    def test_a_dry_run_leaves_it_and_says_so(
        self, config: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert (
            call("launch", "--dry-run", str(config), "--set", f"compute.image={self.pattern}") == 0
        )
        told = capsys.readouterr()
        assert json.loads(told.out)["AlgorithmSpecification"]["TrainingImage"].endswith(
            self.pattern
        )
        assert "is a pattern; a launch first asks the registry for the newest tag" in told.err


class TestLogicalCores:
    """trn2 has 64 ranks of 24 GiB with LNC 2, 128 of 12 GiB with LNC 1; trn1 has nothing to
    choose.
    """

    @pytest.mark.parametrize("name", ["NEURON_LOGICAL_NC_CONFIG", "NEURON_RT_VIRTUAL_CORE_SIZE"])
    @pytest.mark.parametrize(("lnc", "ranks", "gib"), [("1", 128, 12), ("2", 64, 24)])
    def test_ranks_and_memory_follow(
        self, config: Path, name: str, lnc: str, ranks: int, gib: int
    ) -> None:
        from smtrain.client.planner.machines import Machine

        set_ = [f"compute.environment.{name}='{lnc}'", f"compute.image={TAG}"]
        loaded = smtrain.load_config(config, set_=set_)
        machine = Machine.of_config(loaded)
        assert (loaded.processes_per_instance, machine.cores, machine.core_bytes) == (
            ranks,
            ranks,
            gib << 30,
        )
        assert machine.core_flops * ranks == Machine.of(TRN2, 1).core_flops * 64
        made = smtrain.request(config, set_=set_)
        assert made["Environment"]["NEURON_LOGICAL_NC_CONFIG"] == lnc
        assert made["HyperParameters"]["processes_per_instance"] == str(ranks)

    @pytest.mark.parametrize(
        ("kind", "changed", "fault"),
        [
            (
                TRN2,
                ["compute.environment.NEURON_LOGICAL_NC_CONFIG='4'"],
                "is '4', and ml.trn2.48xlarge takes 1 or 2",
            ),
            (TRN2, ["compute.environment.NEURON_LOGICAL_NC_CONFIG=two"], "is 'two', and"),
            (TRN1, ["compute.environment.NEURON_LOGICAL_NC_CONFIG='2'"], "takes 1 only"),
            (TRN1, ["compute.environment.NEURON_RT_VIRTUAL_CORE_SIZE='2'"], "takes 1 only"),
            (
                TRN2,
                [
                    "compute.environment.NEURON_LOGICAL_NC_CONFIG='1'",
                    "compute.environment.NEURON_RT_VIRTUAL_CORE_SIZE='2'",
                ],
                "differs from NEURON_LOGICAL_NC_CONFIG",
            ),
            (
                TRN2,
                ["compute.environment.NEURON_CC_FLAGS=--lnc=1"],
                "compiles for LNC 1, and the runtime has LNC 2",
            ),
            (
                TRN2,
                ["compute.processes_per_instance=128"],
                "has 64 Neuron cores; set at most 64, or compute.environment",
            ),
            (TRN2, ["compute.processes_per_instance=256"], "has 64 Neuron cores; set at most 64"),
            (TRN1, ["compute.processes_per_instance=64"], "has 32 Neuron cores; set at most 32"),
        ],
    )
    def test_a_wrong_one_is_one_sentence(
        self, config: Path, kind: str, changed: list[str], fault: str
    ) -> None:
        image = [] if kind == TRN1 else [f"compute.image={TAG}"]
        report = smtrain.check(config, set_=[*changed, *image, f"compute.instance_type={kind}"])
        (told,) = report.faults
        assert fault in told.text


def test_the_python_of_an_image_is_read_from_its_tag() -> None:
    assert python_of(f"x/y:{TAG}") == "314"
    assert python_of("pytorch:2.13.0-cu133-amzn2023-sagemaker") == "312", "from the table"
    assert python_of("mine:1") is None
