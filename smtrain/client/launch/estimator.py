"""`smtrain.estimator`: a stage as a job object of the installed SageMaker SDK."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from smtrain.client.backends.choose import backend_of, sagemaker
from smtrain.client.config.load import Source
from smtrain.client.launch.inputs import upload_all
from smtrain.client.launch.stages import Chain
from smtrain.client.launch.wheels import wheel_uploads
from smtrain.client.planner.resolve import load_config
from smtrain.client.sdk import build, installed_sdk
from smtrain.core import text
from smtrain.core.config import Stage
from smtrain.core.errors import ConfigError
from smtrain.core.extras import install
from smtrain.core.public_api import public
from smtrain.core.targets import TargetName


@public
def estimator(
    source: Source | None = None,
    *,
    stage: Stage = "train",
    target: TargetName | None = None,
    set_: Sequence[str] = (),
    say: Callable[[str], None] = text.say,
    **sections: Any,
) -> Any:
    """The PyTorch job of the installed SageMaker SDK: the request of `smtrain.request` as an
    object.

    Alter it first if you like: it sends what its attributes say, after uploading what the target
    lacks. Nothing is uploaded or started here.

    Args:
        source: The config: a YAML file's path, a mapping, or a `JobConfig`. None: `sections` are
            all of it.
        stage: The stage that it runs.
        target: `local` or `aws`, in place of the config's `target`.
        set_: `a.b=value` texts, as `--set` takes them; the value is read as YAML. Wins over
            `source` and `sections`.
        say: Called with each line about uploads.
        **sections: The config's sections as mappings, merged into what `source` says.

    Returns:
        Under SDK v3 a `sagemaker.train.ModelTrainer`, to be run with `.train()`; under v2 a
            `sagemaker.pytorch.PyTorch`, to be run with `.fit()`.

    Raises:
        ConfigError: The config is wrong, or no SDK is installed.
        JobError: A stage that this one reads from has not been done.

    Examples:
        >>> trainer = smtrain.estimator("llama.yaml")
        >>> trainer.compute.instance_count
        2
    """
    generation = installed_sdk()
    if generation is None:
        raise ConfigError(
            [
                f"no SageMaker SDK is installed; run `{install('aws')}` for v3 or"
                f" `{install('sdk-v2')}` for v2"
            ],
            code="package.missing",
        )
    config = load_config(source, set_=set_, target=target, **sections)
    place = sagemaker(backend_of(config, target))
    plan = Chain(config, place).plan(stage)

    def upload() -> None:
        upload_all(place, list(plan.uploads), say)
        upload_all(place, wheel_uploads(plan.request, place, say), say)

    return build(generation, place, plan.request, upload)
