"""The only room that imports megatron.core: model, groups, tensors, ownership, and the CPU stand-in for "cuda"."""
