"""Imports of the fork server, which save the processes of a world theirs."""

import gc
import importlib

FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "gpt_neox", "gpt2", "olmo2", "gemma3", "gemma4")

gc.disable()  # as entrypoints/warm.py, for the same reasons
for name in (
    "torch._dynamo",
    "tests.worker.engine.cases",
):  # the first optimizer step imports torch._dynamo
    importlib.import_module(name)
known = importlib.import_module("transformers").CONFIG_MAPPING
for family in FAMILIES:
    if family in known:
        importlib.import_module(f"transformers.models.{family}.modeling_{family}")
gc.freeze()
gc.enable()
