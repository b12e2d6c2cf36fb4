"""Stage export: the newest whole checkpoint in channel `checkpoint` -> a standard Hugging Face
folder.
"""

from __future__ import annotations

import re

from smtrain.core.config import JobConfig
from smtrain.core.protocol.container import Container
from smtrain.worker.entry import main


def stage(config: JobConfig, container: Container) -> None:
    from smtrain.worker.checkpoint.export import BaseModel, export
    from smtrain.worker.checkpoint.megatron.torch_dist_writer import write_torch_dist
    from smtrain.worker.checkpoint.open import open_weights
    from smtrain.worker.checkpoint.targets import Megatron

    weights = container.channel("weights") if container.has_channel("weights") else None
    merge_summary = export(
        container.channel("checkpoint"),
        BaseModel(container.channel("model"), config.model.path, weights),
        container.model_dir,
        merge=config.export.merge,
        merge_base=config.export.merge_base,
        best=config.export.checkpoint == "best",
        title=re.sub(r"-export-[0-9a-f]{8}(-\d+)?$", "", container.job) or "smtrain",
    )
    if merge_summary:
        print(
            f"merged the adapter: {merge_summary.tensors} tensors changed, by"
            f" {merge_summary.largest:.3g} at most",
            flush=True,
        )
    if config.export.megatron:
        write_torch_dist(
            open_weights(container.model_dir), container.model_dir / "megatron", Megatron()
        )
    files = sorted(path.name for path in container.model_dir.iterdir())
    print(f"exported {', '.join(files)}", flush=True)


if __name__ == "__main__":
    main(stage)
