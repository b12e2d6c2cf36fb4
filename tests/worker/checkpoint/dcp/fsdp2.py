"""A rank of a training with FSDP2 whose checkpoint accelerate's own functions write or read:
`torchrun fsdp2.py save|load FOLDER`. The numbers go to FOLDER/numbers.pt.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from accelerate import PartialState
from accelerate.utils import fsdp_utils
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp.fully_sharded_data_parallel import StateDictType
from transformers import AutoConfig, AutoModelForCausalLM


def whole(values: dict[str, Any]) -> dict[str, Any]:
    return {k: v.full_tensor() if hasattr(v, "full_tensor") else v for k, v in values.items()}


def main(action: str, folder: str) -> None:
    PartialState(cpu=True)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    config = AutoConfig.from_pretrained(folder)
    torch.manual_seed(3 if action == "save" else 4)
    model = AutoModelForCausalLM.from_config(config)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    groups = [
        {"params": [p for p in model.parameters() if (p.ndim > 1) == decays], "weight_decay": w}
        for decays, w in ((True, 0.1), (False, 0.0))
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95))
    plugin = SimpleNamespace(
        state_dict_type=StateDictType.SHARDED_STATE_DICT,
        fsdp_version=2,
        state_dict_config=SimpleNamespace(offload_to_cpu=False, rank0_only=False),
        optim_state_dict_config=None,
    )
    accelerator = SimpleNamespace(
        wait_for_everyone=dist.barrier,
        num_processes=dist.get_world_size(),
        process_index=dist.get_rank(),
        is_fsdp2=True,
        is_main_process=dist.get_rank() == 0,
    )
    if action == "save":
        for _ in range(2):
            ids = torch.randint(0, config.vocab_size, (2, 8))
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        fsdp_utils.save_fsdp_model(plugin, accelerator, model, folder)
        fsdp_utils.save_fsdp_optimizer(plugin, accelerator, optimizer, model, folder)
    else:
        fsdp_utils.load_fsdp_model(plugin, accelerator, model, folder)
        fsdp_utils.load_fsdp_optimizer(plugin, accelerator, optimizer, model, folder)
    state: Any = get_optimizer_state_dict(model, optimizer)["state"]
    numbers = {
        "model": whole(get_model_state_dict(model)),
        "state": {name: whole(values) for name, values in state.items()},
        "lr": optimizer.param_groups[0]["lr"],
    }
    if dist.get_rank() == 0:
        torch.save(numbers, Path(folder) / "numbers.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
