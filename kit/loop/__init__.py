"""A loop of pure cores: what happens is an event, what a core decides is a command, and a runner carries both. Standard library only.

ports ──events──> inbox ──one at a time──> core.step(state, event) -> (state, commands) ──by address──> ports, cores, ledger

A core has no clock, I/O or random numbers, so the same core runs on ranks, on a simulated port with a virtual clock, and again from its
ledger. This room knows no lab.
"""
