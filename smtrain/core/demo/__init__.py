"""The demo: real text and a small model, made from this machine's Python only."""

from smtrain.core.demo.inputs import materialise

__all__ = ["materialise"]
