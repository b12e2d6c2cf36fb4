"""The parts of `scripts/bench gpu`.

parts      names, time limits and order
driver     runs each part in its own process
child      such a process
bench      the argument of its function
shapes     the models, and batches of rows
weights    the same initial values for every system
loops      times a training step, of this engine or of a peer
peers      transformers, Liger, torchtitan, peft
rows       the parts that train
kernels    the parts that time single operations
profiling  kernels of a step, and the share of time in which the GPU is busy
figures    MFU, the planner's predictions, ratios, and the printed table
"""
