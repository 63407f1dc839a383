"""Bench view: how long a user waits for a panel, a plot or a large run."""
