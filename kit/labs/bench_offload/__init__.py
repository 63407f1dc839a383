"""Bench offload: how fast a job's tensors go out and back, compared with plain copies."""
