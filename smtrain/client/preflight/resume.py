"""Find the checkpoint from which the run resumes: the newest complete one of its prefix, and faults
of newer ones.
"""

from __future__ import annotations

from collections.abc import Iterator

from smtrain.client.backends.choose import sagemaker
from smtrain.client.findings import Finding
from smtrain.client.jobs.checkpoints import Step, saved_steps
from smtrain.client.launch.ownership import require_owner
from smtrain.client.preflight.context import CheckUnavailable, Context, described_in
from smtrain.core.errors import CheckpointError, JobError
from smtrain.core.model.hf_config import normalise
from smtrain.core.protocol.owner import OwnerError, owner_uri
from smtrain.stages.base import checkpoint_uri


def resume(context: Context) -> Iterator[Finding]:
    """The checkpoints of the run.

    SageMaker copies all of them to every host before training begins.
    """
    if "train" not in context.stages:
        return
    from botocore.exceptions import BotoCoreError, ClientError

    uri = checkpoint_uri(context.config)
    try:
        steps = saved_steps(context.chain.target, uri)
    except (JobError, ClientError, BotoCoreError) as error:
        if "NoSuchBucket" in str(error):
            return  # `buckets` reports it
        if isinstance(error, BotoCoreError):
            raise context.note_unreached("s3", error) from None
        raise CheckUnavailable(f"{uri}: {error}") from None
    if (ownership_fault := _ownership_fault(context)) is not None:
        yield ownership_fault
        return
    if not steps:
        yield Finding("resume", "ok", f"the run starts at step 0: no checkpoint in {uri}")
        return
    complete_steps = [step for step in steps if step.is_complete]
    newest = steps[-1]
    if not context.config.checkpoint.resume:
        yield Finding(
            "resume",
            "fault",
            f"checkpoint.resume is false, and {uri} holds checkpoints up to {newest.name}",
            ("set it to true to resume, or " if complete_steps else "")
            + "give the run another name to start over",
        )
    elif not complete_steps:
        yield Finding(
            "resume",
            "fault",
            f"no checkpoint in {uri} is whole ({len(steps)} found): {newest.name} lacks "
            f"{_names(newest.missing_files)}",
            "restore the missing files, or give the run another name to start over",
        )
    elif _of_another_model(context, complete_steps[-1]):
        yield Finding(
            "resume",
            "fault",
            f"{complete_steps[-1].uri} holds another model than the config.json of model.path"
            " describes",
            "name the model that it was trained from, or give the run another name to start over",
        )
    elif newest.is_complete:
        yield Finding("resume", "ok", f"resumes from {newest.uri}")
    else:
        yield Finding(
            "resume",
            "warning",
            f"{newest.name} is not whole (it lacks {_names(newest.missing_files)}): resumes from "
            f"{complete_steps[-1].name}",
            "nothing needs to be done; the steps since then are trained again",
        )


def _of_another_model(context: Context, step: Step) -> bool:
    """True if the trained model has other sizes than the config's; the worker refuses to resume
    from it.
    """
    try:
        hf_config = described_in(context, context.model_path)
        if hf_config is None or step.model is None:
            return False
        return normalise(hf_config).shape != normalise(step.model).shape
    except (CheckpointError, CheckUnavailable):
        return False  # check `model` reports it


def _ownership_fault(context: Context) -> Finding | None:
    """A fault if another job writes these checkpoints, according to the record next to them."""
    from botocore.exceptions import BotoCoreError, ClientError

    chain = context.chain
    try:
        require_owner(sagemaker(chain.target), context.config, chain.base_name("train"))
    except OwnerError as error:
        text, _, remedy = str(error).partition("; ")
        return Finding("resume", "fault", text, remedy)
    except BotoCoreError as error:
        raise context.note_unreached("s3", error) from None
    except (JobError, ClientError) as error:
        raise CheckUnavailable(f"{owner_uri(checkpoint_uri(context.config))}: {error}") from None
    return None


def _names(file_names: tuple[str, ...]) -> str:
    return ", ".join(file_names[:3]) + (
        f" and {len(file_names) - 3} more" if len(file_names) > 3 else ""
    )
