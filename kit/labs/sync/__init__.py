"""Sync: weights from trainer shards to inference replicas with another layout; complete, exact, in order, with nothing left behind."""
