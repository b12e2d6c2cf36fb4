"""What the fork server imports once, so that no process of a world has to."""

import importlib

import torch._dynamo  # noqa: F401 - the first optimizer step imports it

import tests.worker.engine.cases  # noqa: F401

for family in ("llama", "qwen2", "qwen3", "mistral", "gpt_neox"):
    importlib.import_module(f"transformers.models.{family}.modeling_{family}")
