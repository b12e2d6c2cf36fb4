"""Talking to a model: where it is, a conversation with it or with two side by side, files of prompts, a widget."""
