"""Bench release: the time to release and restore a job's communicators, mode by mode."""
