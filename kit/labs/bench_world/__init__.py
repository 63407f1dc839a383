"""Bench world: how fast a World starts, steps, restarts and reports a death."""
