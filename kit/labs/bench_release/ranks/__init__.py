"""The bench of releasing on a rank."""
