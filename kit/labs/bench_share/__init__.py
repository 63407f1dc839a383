"""Bench share: gain and cost of time sharing, on the loops of the lab share."""
