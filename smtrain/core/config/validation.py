"""The section `train.validation`: which text is held out, and how often the model is judged by it."""

from __future__ import annotations

from pydantic import Field, field_validator

from smtrain.core.config.section import Section


class Validation(Section):
    """Loss on text that the training never sees."""

    interval: int = Field(100, ge=1)
    """Steps between validations; there is one before the first step and one after the last, too."""
    batches: int | None = Field(None, ge=1)
    """How many global batches of the held-out text each validation takes, always the same ones; default: all."""
    fraction: float | None = Field(None, gt=0, lt=1)
    """Share of the documents (sft: conversations) that is held out, chosen by a hash of their text."""
    path: str | None = None
    """Instead of `fraction`: other text to validate on, in every form that data.path takes but hf://."""
    split: str | None = None
    """Instead of `fraction`, for data.format megatron: parts for training, validation and test, as Megatron's
    `--split 980,10,10`, in the order of the documents."""
    keep_best: bool = False
    """Also keep the checkpoint with the lowest validation loss, whatever its age."""
    samples: int = Field(0, ge=0, le=64)
    """sft: how many held-out questions the model answers into the log at every validation."""
    sample_tokens: int = Field(64, ge=1, le=4096)
    """sft: longest of these answers, in tokens."""

    @field_validator("split")
    @classmethod
    def _three_parts(cls, value: str | None) -> str | None:
        if value is not None:
            parts(value)
        return value

    @property
    def chosen(self) -> dict[str, float | str]:
        """What decides which text is held out."""
        given = {"fraction": self.fraction, "path": self.path, "split": self.split}
        return {key: value for key, value in given.items() if value is not None}


def parts(split: str) -> tuple[float, float, float]:
    """The shares of training, validation and test, which add up to 1.

    Raises ValueError where these are no such numbers, or training or validation has none.
    """
    try:
        numbers = [float(part) for part in split.replace("/", ",").split(",") if part.strip()]
    except ValueError:
        raise ValueError("it is two or three numbers with commas between, such as 980,10,10") from None
    numbers += [0.0] * (3 - len(numbers))
    if len(numbers) != 3 or not all(0 <= n < 1e15 for n in numbers):
        raise ValueError("it is two or three numbers with commas between, such as 980,10,10")
    if not numbers[0] or not numbers[1]:
        raise ValueError("it leaves nothing for training or validation; give both a part, such as 980,10,10")
    whole = sum(numbers)
    return numbers[0] / whole, numbers[1] / whole, numbers[2] / whole
