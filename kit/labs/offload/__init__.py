"""Offload: a Megatron job releases everything, is measured while it holds nothing, reloads, and trains on bit for bit."""
