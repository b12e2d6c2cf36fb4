"""The nxd engine: neuronx-distributed does the parallel work, on Trainium1 and wherever its image
runs.

contract    every name of the library in use, and the version it was checked against
library     whether it is installed; the process group
attention   rotary positions, softmax attention or NKI's kernel
build       parallel linears, norms and adapters for the modules
lora        LoRA factors next to parallel linears
model       the families as modules over the library's parallel layers
library_config  its configuration, and the meshes that it cannot train
weights     a rank's parameters from any weight source
optimizer   AdamW that clips by a norm in which each weight counts once; ZeRO-1 is the library's
engine      step and evaluate, as an `Engine`
persist     save and load with the library's functions
completeness  whether a checkpoint of it is whole
adapters    save and load adapters in our own format

Only `library` and `contract` can be imported without neuronx-distributed.
"""
