"""Bench sync: the speed of weight transfer from a trainer to receivers."""
