"""Bytes of memory that text generation takes: what the planner counts for a machine, and a chat for this one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

GIB = 2**30
PROCESS = 0.6 * GIB
"""Of Python with torch and transformers, before anything is loaded."""
CONTEXT = 4096
"""Tokens of prompt and answer that memory is counted for."""


def cache_bytes(described: Mapping[str, Any], tokens: int = CONTEXT, width: int = 2) -> float:
    """Bytes of keys and values of one text; 0 where config.json does not tell."""
    try:
        heads, hidden = int(described["num_attention_heads"]), int(described["hidden_size"])
        kv = int(described.get("num_key_value_heads") or heads)
        size = int(described.get("head_dim") or hidden // heads)
        return 2.0 * int(described["num_hidden_layers"]) * kv * size * width * tokens
    except (KeyError, TypeError, ValueError, ZeroDivisionError):
        return 0.0
