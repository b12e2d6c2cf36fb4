"""What a stage reads, brought to where its job will find it."""

from __future__ import annotations

from smtrain.client.backends.choose import cluster, sagemaker
from smtrain.client.launch.inputs import upload_all
from smtrain.client.launch.stages import Chain, StagePlan
from smtrain.client.launch.wheels import travelling
from smtrain.core.text import Say


def upload(chain: Chain, plan: StagePlan, say: Say) -> None:
    """Upload the code and the inputs of a stage; what is there already is left. Raises `JobError` where that fails."""
    if chain.target.queues:
        place = cluster(chain.target)
        for one in plan.uploads:
            place.put(one.uri, one.files, say)
        return
    target = sagemaker(chain.target)
    upload_all(target, list(plan.uploads), say)
    upload_all(target, travelling(plan.request, target, say), say)
