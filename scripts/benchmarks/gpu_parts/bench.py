"""The argument of a part's function."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from scripts.benchmarks.gpu_parts.driver import RESULT
from scripts.benchmarks.gpu_parts.shapes import bytes_of, model_config, row_length, with_layers


@dataclass
class Bench:
    """The device of a part, its models, and the way to its results."""

    toy: bool
    kind: str = "cuda"
    """The device's type."""
    gib: float = 0.0
    """The device's memory."""
    layers: dict[str, int] = field(default_factory=dict)
    """Layers of the models that were made smaller for this device."""
    fresh: bool = True
    """Whether the part's model still has its initial values."""
    compiled_shape: tuple[int, int] = (0, 0)
    """Rows and length of a micro-batch that `row` measured last."""

    def length(self, tokens: int) -> int:
        """The length of a row, of a 64th at toy size."""
        return row_length(tokens, self.toy)

    def model(self, name: str, width: float = 18.0) -> dict[str, Any]:
        """A model's config.json, with as many layers as fit: `width` is the bytes for each
        parameter.
        """
        config = model_config(name, self.toy)
        while (
            not self.toy
            and config["num_hidden_layers"] > 1
            and bytes_of(config, width) > 0.85 * self.gib * 2**30
        ):
            config = with_layers(config, config["num_hidden_layers"] // 2)
            self.layers[name] = config["num_hidden_layers"]
        return config

    def emit(self, **line: Any) -> None:
        """Print a result; the driver keeps it at once."""
        print(RESULT + json.dumps(line), flush=True)

    def emit_failure(self, error: Exception, **line: Any) -> None:
        """Print the reason why there is no result."""
        self.emit(**line, failed=f"{type(error).__name__}: {' '.join(str(error).split())[:200]}")
