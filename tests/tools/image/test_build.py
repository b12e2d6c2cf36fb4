"""Build an image on another one: its Dockerfile and lock file, and refused bases."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from smtrain.client.launch.image_inspect import ImageContents
from smtrain.client.launch.wheels import lock_file
from smtrain.core.errors import LocalError
from smtrain.core.facts.images import image_uri
from smtrain.core.protocol.entrypoints import WORDS, entrypoints_folder, requirements
from smtrain.stages import STAGES
from smtrain.tools.image.build import recipe
from smtrain.tools.image.lock import Interpreter, Pin
from tests.tools.image.test_lock import index, wheel
from tests.typed import typed as smtrain

__all__ = ["index"]

WHOLE = ImageContents(
    "3.12.3",
    "x86_64",
    0,
    {"torch": "2.9.0", "zlib-ng": "1.1.0"},
    {
        name: {word: [] for word in (*STAGES, *WORDS.values())}
        for name in ("requirements", "wheels")
    },
    {},
    {},
    [],
)


def test_a_known_base_gets_the_wheels_that_no_image_has_without_docker() -> None:
    made = recipe(image_uri("us-west-2", "nxd"), STAGES, None)
    assert made.interpreter == Interpreter("3.12.0", "x86_64")
    assert re.findall(r"^([\w-]+)==", made.lock, re.M) == [
        "gigatoken",
        "awkward",
        "awkward-cpp",
        "zlib-ng",
    ]
    assert made.count == 4
    assert made.dockerfile.splitlines()[1].startswith("FROM 763104351884.dkr.ecr.us-west-2.")
    assert "--no-index" in made.dockerfile
    assert "--require-hashes" in made.dockerfile
    assert "USER" not in made.dockerfile


def test_only_what_the_base_and_the_stages_lack_is_added_and_its_user_is_left_as_it_was(
    index: Path,
) -> None:
    """Also pin the requirements of wheels that usually travel with the job: awkward needs
    importlib-metadata.
    """
    travelling = {line.split("==")[0]: line.split()[0].split("==")[1] for line in lock_lines()}
    for name, version in travelling.items():
        needs = {"awkward": ["importlib-metadata>=4", "torch"]}.get(name, [])
        wheel(index, name.replace("-", "_"), version, *needs)
    wheel(index, "importlib_metadata", "8.0")
    made = recipe("mine:1", STAGES, WHOLE, user="worker")
    packages = re.findall(r"^([\w-]+)==", made.lock, re.M)
    assert packages == ["importlib-metadata", "gigatoken", "awkward", "awkward-cpp"]
    lines = made.dockerfile.splitlines()
    assert lines.index("USER root") < lines.index(
        "COPY requirements.lock /opt/smtrain/requirements.lock"
    )
    assert lines[-1] == "USER worker"
    assert recipe("mine:1", ["export"], WHOLE).count == 0
    pinned = replace(made, pins=(Pin("rich", "14.0", "ab" * 32),))
    assert f"rich==14.0 \\\n    --hash=sha256:{'ab' * 32}\n" in pinned.lock


def lock_lines() -> list[str]:
    return [
        line
        for line in lock_file().read_text("utf-8").splitlines()
        if "==" in line and not line.startswith("#")
    ]


def test_what_the_data_needs_is_added_too(index: Path) -> None:
    for name, version in (("rensa", "0.5.0"), ("phonenumbers", "9.0"), ("tiny_base", "1.0")):
        wheel(index, name, version)
    wheel(index, "datasets", "4.0", "tiny-base")
    known, needs = image_uri("us-west-2", "nxd"), ["data.near_duplicates", "data.pii"]
    assert [pin.name for pin in recipe(known, STAGES, None, needs=needs).pins] == [
        "phonenumbers",
        "rensa",
    ]
    with pytest.raises(
        LocalError, match=r"data\.path: hf://: what datasets>=3 need in turn.*smtrain image pull"
    ):
        recipe(known, STAGES, None, needs=["data.path: hf://"])
    lacking = {
        **WHOLE.lacking,
        "requirements": {**WHOLE.lacking["requirements"], "prepare+hub": ["datasets>=3"]},
    }
    made = recipe("mine:1", ["export"], replace(WHOLE, lacking=lacking), needs=["data.path: hf://"])
    assert [str(pin).partition(" ")[0] for pin in made.pins] == ["datasets==4.0", "tiny-base==1.0"]
    assert recipe("mine:1", ["export"], replace(WHOLE, lacking=lacking)).count == 0


@pytest.mark.full
def test_a_base_of_unknown_contents_gets_only_what_it_lacks(index: Path) -> None:
    """TorchNeuron's image is public, and its packages were not read: its own stay, and torch never
    comes from here.
    """
    base = (
        "public.ecr.aws/neuron/pytorch-training-neuronx:2.14.0-neuronx-py314-sdk2.33.0-ubuntu26.04"
    )
    stages = [stage for stage in STAGES if stage != "evaluate"]
    words = [
        line
        for stage in stages
        for line in requirements(entrypoints_folder() / "requirements.txt", stage)
    ]
    for line in sorted({*words}):
        name = re.split(r"[^\w-]", line)[0]
        wheel(
            index,
            name.replace("-", "_"),
            "99.0",
            *(["torch>=2.4", "tiny-base"] if name == "transformers" else []),
        )
    for line in lock_lines():
        name, version = line.split()[0].split("==")
        wheel(index, name.replace("-", "_"), version)
    wheel(index, "tiny_base", "1.0")
    made = recipe(base, stages, None)
    assert made.interpreter == Interpreter("3.14.0", "x86_64")
    pinned = set(re.findall(r"^([\w-]+)==", made.lock, re.M))
    assert {"transformers", "tiny-base", "pyarrow", "gigatoken", "zlib-ng"} <= pinned
    assert "torch" not in pinned
    file = made.dockerfile
    assert f"\nFROM {base}\n" in file
    assert file.index("pip list") < file.index("pip install"), (
        "its packages are listed first, as the constraint"
    )
    assert "-c /opt/smtrain/had.txt -r /opt/smtrain/requirements.txt" in file
    assert "gigatoken" in made.requirements, "any release of it will do"
    assert "transformers>=4.56" in made.requirements
    config = index.parent / "run.yaml"
    config.write_text(
        "target: aws\nmodel: {path: s3://bucket/m}\ndata: {path: s3://bucket/t}\noutput:"
        " {s3_uri: s3://bucket/out}\ncompute: {instance_type: ml.trn2.48xlarge, region:"
        f" us-west-2, image: '{base}'}}\n"
    )
    done = smtrain("image", "build", str(config), "--from", base, "--print")
    assert done.returncode == 0, (
        "the fault of compute.image names this command, which must not end in that fault"
    )
    assert done.stdout.startswith(file)
    refused = smtrain(
        "image", "build", str(config), "--from", "x:2.14.0-neuronx-py314-sdk2.33.*", "--print"
    )
    assert (
        "is a pattern, and an image is built on one; name a whole tag with --from" in refused.stderr
    )


def test_a_base_without_torch_or_of_an_unknown_python_is_refused() -> None:
    with pytest.raises(LocalError, match="image mine:1 has no torch"):
        recipe("mine:1", STAGES, replace(WHOLE, packages={}))
    with pytest.raises(
        LocalError, match=r"its name does not tell its Python.*smtrain image pull mine:1"
    ):
        recipe("mine:1", STAGES, None)


def test_the_command_prints_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none")
    config = tmp_path / "run.yaml"
    config.write_text(
        "name: mine\nmodel: {path: demo://tiny-llama}\ndata: {path: demo://python-stdlib}\n"
        "compute: {instance_type: ml.trn1.32xlarge, region: us-west-2}\n"
    )
    done = smtrain("image", "build", str(config), "--print")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("# From `smtrain image build`")
    assert "zlib-ng==" in done.stdout
    refused = smtrain("image", "build", str(config))
    assert refused.returncode == 2
    assert "Docker does not answer" in refused.stderr
    assert "or let any builder do it, by --context FOLDER" in refused.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run.yaml"]
