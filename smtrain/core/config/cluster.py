"""The section `cluster`: a Slurm cluster and the options of its jobs (target slurm)."""

from __future__ import annotations

from pydantic import Field

from smtrain.core.config.section import Section
from smtrain.core.config.units import Seconds

_WORD = r"^[^\s'\"]+$"


class Cluster(Section):
    """A Slurm cluster: its head node, the folder that its nodes share, and the options of its
    jobs.
    """

    host: str | None = Field(None, pattern=r"^[^\s'\"-][^\s'\"]*$")
    """The head node as your ssh knows it, such as me@head; default: this machine can run sbatch
    itself.
    """
    shared: str | None = Field(None, pattern=r"^/[^\s'\"\\$`%]*[^\s'\"\\$`%/]$")
    """A folder that all nodes see under the same path, such as /fsx/smtrain: inputs, logs,
    checkpoints and results.
    """
    partition: str | None = Field(None, pattern=_WORD)
    """Partition of the stages compile and train; default: the cluster's."""
    cpu_partition: str | None = Field(None, pattern=_WORD)
    """Partition of all other stages; default: the same."""
    account: str | None = Field(None, pattern=_WORD)
    """Account to charge (sbatch --account)."""
    qos: str | None = Field(None, pattern=_WORD)
    """Quality of service (sbatch --qos)."""
    reservation: str | None = Field(None, pattern=_WORD)
    """Reservation to use (sbatch --reservation)."""
    constraint: str | None = Field(None, pattern=_WORD)
    """Features that nodes must have (sbatch --constraint)."""
    time: Seconds | None = Field(None, ge=60, le=365 * 86400)
    """Time limit of one attempt, as 4h; a train job saves before it and requeues itself until its
    steps are done. Default: compute.max_run.
    """
    save_before: Seconds = Field(300, ge=30, le=3600)
    """Time before the limit at which a job is told to save."""
    restarts: int = Field(3, ge=0, le=100)
    """Number of times a failed train job is started again; not if it fails at the same step twice.
    """
    venv: str | None = Field(None, pattern=_WORD)
    """A virtual environment on the nodes, which holds smtrain[train]; default: the nodes' python3.
    """
    modules: tuple[str, ...] = ()
    """Environment modules to load (module load)."""
    setup: tuple[str, ...] = ()
    """Shell lines that run on the first node before the stage starts; variables that they export
    reach all nodes.
    """
    container: str | None = Field(None, pattern=_WORD)
    """Image that the stage runs in: a .sif file for Apptainer, anything else for Pyxis (srun
    --container-image).
    """
    sbatch: tuple[str, ...] = ()
    """Further options of sbatch, such as ["--mail-type=END"]. --export=NAME passes a variable of
    the shell on.
    """
    cpu_sbatch: tuple[str, ...] = ()
    """Options of sbatch that request a part of a node, such as ["--cpus-per-task=8", "--mem=64G"],
    for all stages but compile and train. Default: whole nodes (--exclusive, --mem=0).
    """
    srun: tuple[str, ...] = ()
    """Further options of srun, such as ["--cpu-bind=none"]."""
    hyperpod: bool = False
    """SageMaker HyperPod: srun replaces faulty nodes and continues (--auto-resume=1)."""
