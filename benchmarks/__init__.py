"""What mcore_patch costs, as ratios to stock megatron-core on the same work: ``python -m benchmarks``."""
