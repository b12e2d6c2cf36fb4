"""Stage convert: the weights of channel `weights`, or else `model` -> NxD shards for (tp, pp) in
the model folder.

Of families that NxD does not know, and of the text part of a multimodal model, it leaves a Hugging
Face folder.
"""

from __future__ import annotations

from smtrain.core.config import JobConfig
from smtrain.core.protocol.container import Container
from smtrain.worker.entry import main


def stage(config: JobConfig, container: Container) -> None:
    from smtrain.core.model.shape import ModelShape
    from smtrain.worker.checkpoint.convert import convert
    from smtrain.worker.checkpoint.huggingface.folder import read_config
    from smtrain.worker.checkpoint.huggingface.writer import write_hf
    from smtrain.worker.checkpoint.open import open_weights
    from smtrain.worker.checkpoint.targets import Nxd

    tp, pp = config.parallel.tp, config.parallel.pp
    model = container.channel("model")
    source, model_config = (
        (container.channel("weights") if container.has_channel("weights") else model),
        read_config(model),
    )
    if not ModelShape.from_config(model_config).rules.nxd_and_megatron:
        write_hf(open_weights(source, model_config), container.model_dir)
        print("one copy of the weights for every mesh", flush=True)
        return
    convert(source, container.model_dir, to=Nxd(tp=tp, pp=pp), config=model, overwrite=True)
    print(f"{tp * pp} shards for tp {tp} x pp {pp}", flush=True)


if __name__ == "__main__":
    main(stage)
