"""Bench routing: the offload lab with collectives through torch's own backends and through torchcomms."""
