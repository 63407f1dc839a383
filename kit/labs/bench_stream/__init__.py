"""Bench stream: gain and cost of asynchrony, on the loops of the lab stream."""
