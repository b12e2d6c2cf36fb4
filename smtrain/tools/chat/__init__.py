"""Talk to a model: find it, hold a conversation with it or with two side by side, answer files of
prompts.
"""
