"""Stage export: the newest whole checkpoint in channel `checkpoint` -> an ordinary Hugging Face folder."""

from __future__ import annotations

from smtrain.config import JobConfig
from smtrain.contract.container import Container
from smtrain.train.entry import main


def stage(_config: JobConfig, container: Container) -> None:
    from smtrain.checkpoint.export import export

    export(container.channel("checkpoint"), container.channel("model"), container.model_dir)
    files = sorted(path.name for path in container.model_dir.iterdir())
    print(f"exported {', '.join(files)}", flush=True)


if __name__ == "__main__":
    main(stage)
