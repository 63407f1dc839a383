"""The bench of time sharing on a rank."""
