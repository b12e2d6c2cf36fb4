"""The native engine: transformers' own models under tensor, pipeline and data parallelism, in plain
torch.

comm       process group, device, collectives with their gradients
stage      one (tp, pp) rank's part of the model
parameters  the flat buffer that the optimizer updates
attention  positions, rotary embeddings and masks, or documents, of a batch
attention_function  the attention of all layers, chosen by its mask
varlen     attention by documents: in FlashAttention (attention_flash) or plain torch (attention_chunks)
attention_sinks  attention with sinks under masks
context_parallel  attention and states over rows that are cut over ranks
kv_cache   keys, values and states of earlier tokens, for generation
local_experts  the matrices of a rank's experts; grouped_mm: their products
load_balancing  the auxiliary loss of experts
experts_next_to_mlp  the experts of Gemma 4, next to the MLP of a block
gated_delta  the linear attention of Qwen3.5 and Qwen3-Next
linears    row-parallel linears; gradients of linears and embeddings
gradients  the flat buffer in which a step's gradients are summed
layers     compilation and activation checkpointing
lora       the adapters of a stage
loss_scaling  the scale of fp16 losses
pipeline   1F1B over the stages
transfer   batches to the device, numbers back, without a wait
exchange   the messages of data-parallel ranks in a step
optimizer  a step: sums of gradients, clipping, fp16 scales, update
zero1      AdamW whose state is split over the data-parallel ranks
full_shard  the same with weights and gradients split too
sharded_weights  the rows that FSDP2 cuts and gathers
replicas   sums of gradients over tensor-parallel ranks and the pipeline's ends
engine     the three together: step, evaluate, logits
persist    save and load
"""

from smtrain.worker.engine.native.comm import init_distributed
from smtrain.worker.engine.native.engine import NativeEngine

__all__ = ["NativeEngine", "init_distributed"]
