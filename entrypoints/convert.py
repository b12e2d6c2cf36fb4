"""Stage convert: the weights of channel `weights`, or else `model` -> NxD shards for (tp, pp) in the model folder."""

from __future__ import annotations

from smtrain.core.config import JobConfig
from smtrain.core.protocol.container import Container
from smtrain.worker.train.entry import main


def stage(config: JobConfig, container: Container) -> None:
    from smtrain.worker.checkpoint.convert import convert
    from smtrain.worker.checkpoint.targets import Nxd

    tp, pp = config.parallel.tp, config.parallel.pp
    model = container.channel("model")
    source = container.channel("weights") if container.has_channel("weights") else model
    convert(source, container.model_dir, to=Nxd(tp=tp, pp=pp), config=model, overwrite=True)
    print(f"{tp * pp} shards for tp {tp} x pp {pp}", flush=True)


if __name__ == "__main__":
    main(stage)
