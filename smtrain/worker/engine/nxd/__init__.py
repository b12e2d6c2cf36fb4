"""The nxd engine: neuronx-distributed does the parallel work, on Trainium1 and wherever its image runs.

contract    every name of the library that is used, and the version it was checked against
library     is it here, in which version; the process group
attention   rotary positions, softmax attention or NKI's kernel
build       what the modules are made from: parallel linears, norms, adapters
lora        the factors of LoRA beside parallel linears
model       the families as modules over the library's parallel layers
limits      what it cannot do with a model on a mesh
library_config  what the library is told of a mesh
weights     a rank's parameters from any weight source
optimizer   AdamW that clips by a norm in which each weight counts once; ZeRO-1 is the library's
engine      step, evaluate, logits behind the seam
persist     save and load by the library's functions, when a checkpoint is whole, pruning
adapters    what is saved of adapters, in the native engine's form

Only `library` and `contract` can be imported without neuronx-distributed.
"""
