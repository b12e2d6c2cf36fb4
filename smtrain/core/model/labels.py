"""What a label says, to data and engines alike."""

from __future__ import annotations

IGNORED = -100
"""The label of a position that counts in no loss: torch's and transformers' own (torch.nn.CrossEntropyLoss)."""
