"""The task of a process of `smtrain doctor --train`, and the models that it trains."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from smtrain.core.model.shape import ModelShape

State = Literal["done", "failed", "ended", "hung", "skipped"]
STEPS, SAVE_STEP = 20, 10
"""Steps of each run of the small model, and the step after which it saves."""
_LENGTH = 128  # tokens of a sample of the small model
RECORD, SPEC = "record.jsonl", "task.json"
# hidden, layers, heads, key/value heads, intermediate, vocabulary
_SMALL = (128, 4, 4, 2, 384, 2048)
_LADDER = (
    (128, 4, 4, 2, 384, 4096), (256, 8, 8, 4, 704, 8192), (512, 8, 8, 4, 1408, 16384),
    (768, 12, 12, 4, 2048, 32768), (1024, 24, 16, 8, 2816, 32768), (2048, 16, 32, 8, 8192, 65536),
)  # fmt: skip
_SMALL_PARAMETERS = (
    60e6  # parameters up to which the small model is the given one, with fewer layers
)


@dataclass(frozen=True)
class SizedModel:
    """A model with the size of its batches."""

    config: dict[str, Any]
    """config.json; the weights are random."""
    batch: int
    """Samples of a step, over all processes."""
    length: int
    """Tokens of a sample."""
    micro_batch: int

    @property
    def shape(self) -> ModelShape:
        return ModelShape.from_config(self.config)


@dataclass(frozen=True)
class Task:
    """Parts that one process, or one process for each device, does after each other."""

    group: str
    """The name of the group, which its parts' outcomes and files have too."""
    device: str
    """Kind of device: cpu, cuda, neuron."""
    processes: int
    parts: tuple[str, ...]
    folder: str
    small: SizedModel
    large: SizedModel
    precision: str
    """Precision of the large model."""
    seconds: float
    """Time of a measurement of speed."""
    watched: int
    """The process that started all this; its children end when it does."""
    checkpoints: str = ""
    """The folder of its checkpoints, which tasks of the same devices share."""
    killed: bool = False
    """It continues to train after its last part, until it is killed."""
    meshes: tuple[tuple[int, int], ...] = ((1, 1),)
    """(tp, dp) of its trainings of the small model; the first one saves."""

    def write(self) -> Path:
        """Write the task to its folder; returns the file."""
        file = Path(self.folder) / f"{self.group}-{SPEC}"
        file.write_text(json.dumps(asdict(self)), "utf-8")
        return file

    @classmethod
    def read(cls, file: str) -> Task:
        """The task in a file."""
        plain = json.loads(Path(file).read_text("utf-8"))
        models = {key: SizedModel(**plain.pop(key)) for key in ("small", "large")}
        meshes = tuple((tp, dp) for tp, dp in plain.pop("meshes"))
        return cls(**{**plain, **models, "meshes": meshes, "parts": tuple(plain["parts"])})

    def record(self) -> Path:
        """The file of its lines: {part, state, result or reason}."""
        return Path(self.folder) / f"{self.group}-{RECORD}"


def llama(
    hidden_size: int, layers: int, heads: int, kv_heads: int, intermediate: int, vocabulary: int
) -> dict[str, Any]:
    """config.json of a Llama of these sizes."""
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": hidden_size,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": intermediate,
        "vocab_size": vocabulary,
        "head_dim": hidden_size // heads,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "hidden_act": "silu",
    }


def ladder() -> list[dict[str, Any]]:
    """The models from 2 million to 1.2 billion parameters of which a device gets the largest that
    suits it.
    """
    return [llama(*sizes) for sizes in _LADDER]


def with_layers(config: dict[str, Any], layers: int) -> dict[str, Any]:
    """The model with fewer layers."""
    layer_count = ModelShape.from_config(config).layers
    names = ("num_hidden_layers", "n_layer")
    cut = {
        key: (
            layers
            if key in names
            else value[:layers]
            if isinstance(value, list) and len(value) == layer_count
            else value
        )
        for key, value in config.items()
    }
    return cut if layer_count > layers else config


def small_model(model_config: dict[str, Any] | None, dp: Sequence[int]) -> tuple[SizedModel, str]:
    """The model of the parity runs, and a note about it; its batch can be cut by each of `dp`."""
    config, note = llama(*_SMALL), ""
    if model_config is not None:
        cut = with_layers(model_config, 2)
        if ModelShape.from_config(cut).parameters() <= _SMALL_PARAMETERS:
            config = cut
        else:
            note = (
                "the given model is too large for 20 steps on the CPU: parity is that of a small"
                " Llama"
            )
    positions = ModelShape.from_config(config).positions
    largest_dp = max(dp)
    batch = largest_dp * -(-4 // largest_dp)
    return (
        SizedModel(config, batch, min(_LENGTH, positions or _LENGTH), min(2, batch // largest_dp)),
        note,
    )


def scale_batch(model: SizedModel, processes: int) -> SizedModel:
    """The same work on each of several data-parallel processes."""
    return replace(model, batch=model.batch * processes)
