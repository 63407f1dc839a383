"""Models that a replica serves with, behind one protocol: the kit's Megatron model, a Hugging Face model, a real engine, your own.

`hosted` has the protocol, `contents` what the lab itself sees of a model. This room knows no lab.
"""
