"""Rules for every target whose jobs are pods with one store: PAI-DLC and Kubernetes."""

from __future__ import annotations

from smtrain.client.config.checks.rule import ConfigRule as Rule
from smtrain.client.config.checks.rule import no_s3_checkpoints, sagemaker_rules


def pod_rules(title: str, storage: str) -> tuple[Rule, ...]:
    """The rules; `title` names the target, `storage` the key of its store."""
    return (
        no_s3_checkpoints(title, storage),
        *sagemaker_rules(
            "spot",
            "fallback_regions",
            "keep_alive",
            "training_plan",
            "infra_check",
            "retries",
            "compile_ahead",
            "instance_group",
        ),
        *(
            Rule(
                f"data.{name}",
                broken_by,
                f"data.{name}: on {title} one pod prepares the data; leave it out",
            )
            for name, broken_by in (
                ("machines", lambda c: c.data.machines > 1),
                ("ray_address", lambda c: c.data.ray_address),
            )
        ),
        Rule(
            "track.tensorboard",
            lambda c: c.track.tensorboard == "live",
            "track.tensorboard: SageMaker alone copies these files while a job runs; leave it out",
        ),
    )
