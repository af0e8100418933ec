"""CUDA graphs of layers and whole iterations: capture them, compare them, guard them."""
