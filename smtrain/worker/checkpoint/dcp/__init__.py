"""Folders of torch.distributed.checkpoint (DCP), as torchtitan and accelerate's FSDP write them."""
