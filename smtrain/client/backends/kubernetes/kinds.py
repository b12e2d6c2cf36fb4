"""The kinds of objects that a stage can become, by `kubernetes.kind`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ObjectKind:
    """An API and the fields in which it differs from the other ones."""

    api: str
    """Group and version."""
    kind: str
    plural: str
    controller: str = ""
    """The controller that the cluster needs; empty if every cluster has it."""
    dependents: tuple[tuple[str, str, str], ...] = ()
    """(API, kind, plural) of further objects that a job of this kind gets."""
    suspend_path: tuple[str, ...] = ("suspend",)
    """The field below `spec` by which the job is suspended."""
    stops_by_file: bool = True
    """Whether the exit status of a stopped pod ends the job. If not, it must be suspended."""

    @property
    def group(self) -> str:
        return self.api.rpartition("/")[0]

    def suspension(self, value: bool) -> dict[str, Any]:
        """The change of a job that suspends it."""
        change: Any = value
        for key in reversed(("spec", *self.suspend_path)):
            change = {key: change}
        return dict(change)

    def is_suspended(self, job: Any) -> bool:
        """Whether a job of this kind is suspended."""
        value = job.get("spec") or {}
        for key in self.suspend_path:
            value = (value or {}).get(key)
        return bool(value)


KINDS = {
    "job": ObjectKind("batch/v1", "Job", "jobs", dependents=(("v1", "Service", "services"),)),
    "jobset": ObjectKind("jobset.x-k8s.io/v1alpha2", "JobSet", "jobsets", "the JobSet controller"),
    "trainjob": ObjectKind(
        "trainer.kubeflow.org/v1alpha1",
        "TrainJob",
        "trainjobs",
        "Kubeflow Trainer",
        dependents=(("trainer.kubeflow.org/v1alpha1", "TrainingRuntime", "trainingruntimes"),),
    ),
    "hyperpod": ObjectKind(
        "sagemaker.amazonaws.com/v1",
        "HyperPodPyTorchJob",
        "hyperpodpytorchjobs",
        "HyperPod's training operator",
        suspend_path=("runPolicy", "suspend"),
        stops_by_file=False,
    ),
}


def kind_of(job: Any) -> ObjectKind:
    """The kind of an object of the API; a Job if it does not say."""
    kinds = {record.kind: record for record in KINDS.values()}
    return kinds.get(str(job.get("kind")), KINDS["job"])
