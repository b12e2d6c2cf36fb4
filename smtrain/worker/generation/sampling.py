"""Sampling settings: greedy, temperature, top-k and top-p, beams, and stop strings."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import isfinite

from smtrain.core.errors import ConfigError


@dataclass(frozen=True)
class Sampling:
    """Settings of one generation, named as transformers names them.

    Raises `ConfigError` for values without meaning.
    """

    max_new_tokens: int = 64
    """Longest text, in tokens."""
    temperature: float = 0.0
    """0 takes the likeliest token each time; 1 follows the model's probabilities."""
    top_k: int = 0
    """Draw among this many likeliest tokens; 0: among all."""
    top_p: float = 1.0
    """Draw among the likeliest tokens that together have this probability; 1: among all."""
    beams: int = 1
    """Keep this many candidate texts and take the likeliest; 1: no beam search."""
    length_penalty: float = 1.0
    """With beams: above 0 prefers longer texts, below 0 shorter ones."""
    stop: tuple[str, ...] = ()
    """Strings that end a text; they are not part of it."""
    seed: int = 0
    """The same seed draws the same text."""

    def __post_init__(self) -> None:
        if faults := list(self._faults()):
            raise ConfigError(faults, code="config.wrong_value")

    def _faults(self) -> Iterator[str]:
        if self.max_new_tokens < 1:
            yield f"max_new_tokens: got {self.max_new_tokens}; at least 1 is needed"
        if not (self.temperature >= 0 and isfinite(self.temperature)):
            yield f"temperature: got {self.temperature}; it is 0 (greedy) or a number above"
        if self.top_k < 0:
            yield f"top_k: got {self.top_k}; it is 0 (all tokens) or a number of tokens"
        if not 0 < self.top_p <= 1:
            yield f"top_p: got {self.top_p}; it is a probability above 0 and at most 1"
        if self.beams < 1:
            yield f"beams: got {self.beams}; at least 1 is needed"
        if not isfinite(self.length_penalty):
            yield f"length_penalty: got {self.length_penalty}; a number is needed"
        if any(not text for text in self.stop):
            yield "stop: got an empty string, which would end every text at once; leave it out"
        if not 0 <= self.seed < 2**63:
            yield f"seed: got {self.seed}; it is a whole number from 0 to 2^63 - 1"
        if self.temperature == 0 and (self.top_k or self.top_p < 1):
            name = "top_k" if self.top_k else "top_p"
            yield (
                f"{name}: has no effect at temperature 0, which always takes the likeliest token;"
                " set a temperature"
            )
        if self.beams == 1 and self.length_penalty != 1:
            yield "length_penalty: has an effect only with beams above 1"

    @property
    def is_random(self) -> bool:
        """Whether tokens are drawn at random."""
        return self.temperature > 0


def cut_at(text: str, stop: tuple[str, ...]) -> tuple[str, bool]:
    """The text up to the first stop string in it, and whether there was one."""
    places = [place for stop_string in stop if (place := text.find(stop_string)) >= 0]
    return (text[: min(places)], True) if places else (text, False)


def held_back(text: str, stop: tuple[str, ...]) -> int:
    """Count the characters at the end of `text` that may begin a stop string."""
    longest = 0
    for stop_string in stop:
        for length in range(min(len(stop_string) - 1, len(text)), longest, -1):
            if text.endswith(stop_string[:length]):
                longest = length
                break
    return longest
