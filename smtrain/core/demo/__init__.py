"""The demo: real text and a small model made from nothing but this machine, and what is shown at its end."""

from smtrain.core.demo.inputs import materialise

__all__ = ["materialise"]
