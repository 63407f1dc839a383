"""The bench of the split step on a rank."""
