"""Bench split: the cost of a split step compared with the plain one."""
