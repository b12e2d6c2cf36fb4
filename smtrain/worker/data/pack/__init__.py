"""Token files: Megatron's indexed dataset, packing, import and export."""
