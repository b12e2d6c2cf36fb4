"""Judge by its name whether an image can run the train stage, before anything is uploaded or
paid.
"""

from __future__ import annotations

import re
from typing import Any

from smtrain.core.facts import table
from smtrain.core.facts.engines import is_gpu, is_neuron
from smtrain.core.facts.gpus import chip_of, cuda_needed, has_kernels, is_arm
from smtrain.core.facts.images import (
    gpu_row,
    gpu_rows,
    known_image,
    looked_for,
    python_of,
    sdk_release,
    serves,
    torch_of,
    with_repository,
)

# AWS's repositories of images that serve models; copies usually keep the name, other names are
# free.
_SERVES_MODELS = re.compile(
    r"(huggingface-)?(pytorch|tensorflow)-inference|(huggingface-)?(vllm|sglang)\b|huggingface-pytorch-(tgi|tei)|djl-"
)
_CUDA = re.compile(r"-(gpu|cu\d{2,3})(-|$)")
_CPU = re.compile(r"-cpu(-|$)")
_CUDA_RELEASE = re.compile(r"-cu(\d{2})(\d)(?:-|$)")


def image_fault(uri: str, engine: str, instance_type: str) -> str | None:
    """The fault, with its remedy, if stage train cannot run in an image on machines of a type."""
    name = with_repository(uri).rpartition("/")[2]
    if "*" in name and (fault := _pattern_fault(name)):
        return fault
    if uri.startswith("public.ecr.aws/"):
        return (
            "SageMaker does not pull from public.ecr.aws; copy it with `smtrain image build CONFIG"
            f" --from {uri} --push URI` to a repository of your account, and name that"
        )
    remedy = otherwise(engine, instance_type)
    return (
        _wrong_kind(name, instance_type, remedy)
        or _wrong_gpu(name, instance_type)
        or _wrong_release(name, engine, instance_type, remedy)
    )


def _pattern_fault(name: str) -> str | None:
    """A pattern must fix what decides about the job: repository, and release of Neuron."""
    repository, _, tag = name.partition(":")
    if "*" in repository or not tag:
        return "a pattern may have * in the tag only; write REPOSITORY:TAG"
    if sdk_release(name) is None:
        return (
            f"the pattern {tag} does not fix a release of Neuron; write one that does, such as"
            " *-neuronx-*-sdk2.33.*"
        )
    return None


def otherwise(engine: str, instance_type: str) -> str:
    """Say what to name instead.

    No image of engine native is known for Neuron cores until one was seen.
    """
    if not is_neuron(instance_type) or known_image(engine):
        return "leave it out for the newest known one (`smtrain images`)"
    return looked_for(engine)


def _wrong_kind(name: str, instance_type: str, remedy: str) -> str | None:
    """An image that serves models, or one for other devices than the machines have."""
    if _SERVES_MODELS.match(name):
        return (
            f"this image serves models ({name.partition(':')[0]}) and has no training software;"
            f" {remedy}"
        )
    neuron, gpu = is_neuron(instance_type), is_gpu(instance_type)
    if gpu and (sdk_release(name) or "neuronx" in name):
        return f"this image is for Neuron cores, and {instance_type} has GPUs; {remedy}"
    if neuron and (gpu_row(name) or _CUDA.search(name)):
        return f"this image is for GPUs, and {instance_type} has Neuron cores; {remedy}"
    if (neuron or gpu) and _CPU.search(name):
        return (
            f"this image is for CPUs, and {instance_type} has {'GPUs' if gpu else 'Neuron cores'};"
            f" {remedy}"
        )
    row = gpu_row(name)
    if gpu and row is not None and not row["whole"]:
        full_row = next(r for r in gpu_rows() if r["whole"])
        return (
            f"{row['repository']} has no transformers, which every stage imports; build one on it"
            f" that has, or leave it out for {full_row['repository']}"
        )
    return None


def _wrong_gpu(name: str, instance_type: str) -> str | None:
    """An image whose CUDA, by its name, has no kernels for the GPUs, or one for other
    processors.
    """
    if not is_gpu(instance_type):
        return None
    if "arm64" in name and not is_arm(instance_type):
        return (
            f"this image is for arm64, and {instance_type} has x86_64 processors; name one for"
            " x86_64"
        )
    if is_arm(instance_type) and gpu_row(name):
        return (
            f"this image is for x86_64, and {instance_type} has arm64 processors; name one for"
            " arm64"
        )
    match = _CUDA_RELEASE.search(name)
    cuda = f"{match[1]}.{match[2]}" if match else ""
    if cuda and not has_kernels(cuda, instance_type):
        return (
            f"this image has CUDA {cuda}, without kernels for {chip_of(instance_type)} GPUs; name"
            f" one with {cuda_needed(instance_type)}"
        )
    return None


def _wrong_release(name: str, engine: str, instance_type: str, remedy: str) -> str | None:
    """An image whose Python, release of Neuron or torch the job cannot use."""
    images: dict[str, Any] = table("images")
    python, our_pythons = python_of(name), images["contents"]["pythons"]
    if python is not None and python not in our_pythons:
        return (
            f"this image has Python {_format_python(python)}, and smtrain runs on"
            f" {_span(our_pythons)}; {remedy}"
        )
    if not is_neuron(instance_type):
        return None
    row = images["engines"][engine]
    if serves(name, engine) is False:
        release = ".".join(map(str, sdk_release(name) or ()))
        return (
            f"this image has Neuron {release}, and engine {engine} needs {row['needs']}; {remedy}"
        )
    if python is not None and python not in row.get("pythons", our_pythons):
        return (
            f"this image has Python {_format_python(python)}, and TorchNeuron has only"
            f" {_span(row['pythons'])}; {remedy}"
        )
    torch = torch_of(name)
    if torch != "0" and _numbers(torch) < _numbers(row.get("torch", "0")):
        return (
            f"this image has torch {torch}, and engine {engine} needs TorchNeuron on torch"
            f" {row['torch']} or later; {remedy}"
        )
    return None


def _numbers(release: str) -> tuple[int, ...]:
    return tuple(int(part) for part in release.split("."))


def _format_python(python: str) -> str:
    """Write 314 as 3.14."""
    return f"{python[0]}.{python[1:]}"


def _span(pythons: list[str]) -> str:
    return f"Python {_format_python(pythons[0])} to {_format_python(pythons[-1])}"
