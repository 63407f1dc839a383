"""The bench of Worlds on a rank."""
