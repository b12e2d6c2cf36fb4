"""Stage convert: the Hugging Face model in channel `model` -> NxD shards for (tp, pp) in the model folder."""

from __future__ import annotations

from smtrain.config import JobConfig
from smtrain.contract.container import Container
from smtrain.train.entry import main


def stage(config: JobConfig, container: Container) -> None:
    from smtrain.checkpoint.convert import convert

    tp, pp = config.parallel.tp, config.parallel.pp
    convert(container.channel("model"), container.model_dir, tp=tp, pp=pp, overwrite=True)
    print(f"{tp * pp} shards for tp {tp} x pp {pp}", flush=True)


if __name__ == "__main__":
    main(stage)
