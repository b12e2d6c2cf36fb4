"""Imports of the fork server, which save the processes of a world theirs."""

import importlib

import torch._dynamo  # noqa: F401 - the first optimizer step imports it
from transformers import CONFIG_MAPPING

import tests.worker.engine.cases  # noqa: F401

for family in ("llama", "qwen2", "qwen3", "mistral", "gpt_neox", "gpt2", "olmo2", "gemma3", "gemma4"):
    if family in CONFIG_MAPPING:
        importlib.import_module(f"transformers.models.{family}.modeling_{family}")
