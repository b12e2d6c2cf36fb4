"""Does a trained model answer better? lm-evaluation-harness over one or two models, and what their
difference means.
"""
