"""From text to token batches: read sources, tokenize, write Megatron's indexed format, feed training.

Only `loader` needs torch; everything else runs on a plain CPU machine with `tokenizers` and numpy.
"""
