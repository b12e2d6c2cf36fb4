"""Check whether jobs can run in an image: look inside it, and start the launcher once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from smtrain.client.findings import Finding, Report
from smtrain.client.launch.image_inspect import FOLDER, ImageContents, inspect_image, run
from smtrain.client.preflight.image import libraries
from smtrain.core.config import Stage
from smtrain.core.facts.engines import is_gpu, is_neuron

NEURON = {"neuronx-cc": "the Neuron compiler", "neuron-ls": "the Neuron tools"}
LARGE = 30 * 10**9


def verify(
    client: Any,
    image: Any,
    stages: Sequence[Stage],
    engine: str,
    instance_type: str | None,
    needs: Sequence[str] = (),
) -> Report:
    """Every finding about an image on this machine.

    `instance_type` None: accelerators are not checked. `needs`: the packages of the data
    (core/protocol/entrypoints.py). Raises `LocalError` if no container of it runs.
    """
    contents = inspect_image(client, image, engine)
    return Report(
        (
            *_size(image),
            *_libraries(contents, stages, needs),
            *_imports(contents),
            *_accelerator(contents, instance_type),
            *_user(contents),
            *_contract(client, image),
        )
    )


def _size(image: Any) -> Iterator[Finding]:
    size = int(image.attrs["Size"])
    level, remedy = (
        ("warning", "every host pulls it at every start outside a warm pool")
        if size > LARGE
        else ("ok", "")
    )
    yield Finding("size", level, f"it takes {size / 1e9:.1f} GB on a disk", remedy)  # type: ignore[arg-type]


def _libraries(
    contents: ImageContents, stages: Sequence[Stage], needs: Sequence[str] = ()
) -> Iterator[Finding]:
    yield from libraries(contents, stages, needs)
    versions = [
        f"{name} {contents.packages[name]}"
        for name in ("torch", "transformers")
        if name in contents.packages
    ]
    yield Finding("libraries", "ok", ", ".join([f"Python {contents.python}", *versions]))


def _imports(contents: ImageContents) -> Iterator[Finding]:
    reasons: dict[str, list[str]] = {}
    for module, reason in contents.faults.items():
        reasons.setdefault(reason, []).append(module)
    for reason, modules in reasons.items():
        module_text = (
            modules[0]
            if len(modules) == 1
            else f"{modules[0]} and {len(modules) - 1} more module{'s' * (len(modules) > 2)}"
        )
        yield Finding("imports", "fault", f"{module_text} cannot be imported: {reason}")
    if not reasons:
        yield Finding(
            "imports", "ok", "everything that the stages import can be, torchrun included"
        )


def _accelerator(contents: ImageContents, instance_type: str | None) -> Iterator[Finding]:
    if instance_type and is_neuron(instance_type):
        for program, purpose in NEURON.items():
            if not contents.programs.get(program):
                yield Finding(
                    "accelerator",
                    "fault",
                    f"it has no {program} ({purpose}), which {instance_type} needs",
                    "build on a Neuron image (`smtrain images`)",
                )
    if instance_type and (is_neuron(instance_type) or is_gpu(instance_type)):
        has_libfabric = bool(contents.programs.get("fi_info"))
        yield Finding(
            "network",
            "ok" if has_libfabric else "warning",
            (
                "it has libfabric (fi_info)"
                if has_libfabric
                else "it has no fi_info: hosts may talk to each other without EFA"
            ),
            "" if has_libfabric else "build on one of AWS's images, or install the EFA libraries",
        )


def _user(contents: ImageContents) -> Iterator[Finding]:
    if contents.uid or contents.unwritable:
        limits = (
            f", who may not write to {', '.join(contents.unwritable)}"
            if contents.unwritable
            else ""
        )
        yield Finding(
            "user",
            "warning",
            f"its containers run as user {contents.uid}{limits}; SageMaker's folders belong to"
            " root",
            "end its Dockerfile with USER root",
        )
    else:
        yield Finding("user", "ok", "its containers run as root")


def _contract(client: Any, image: Any) -> Iterator[Finding]:
    """Start the launcher without inputs: it must fail, and say why in the file that SageMaker
    reads.
    """
    command = ["python3", f"{FOLDER}/entrypoints/launch.py", "convert"]
    status, output, failure = run(client, image, command, read="/opt/ml/output/failure")
    if status and failure:
        yield Finding(
            "contract",
            "ok",
            "a stage that fails says why in /opt/ml/output/failure and ends with a status",
        )
    else:
        last = (output.strip().splitlines() or ["nothing"])[-1]
        yield Finding(
            "contract",
            "fault",
            f"a stage without inputs left with {status} and wrote no /opt/ml/output/failure; it "
            f"said: {last}",
            "look at the image's own start files and at its user's rights",
        )
