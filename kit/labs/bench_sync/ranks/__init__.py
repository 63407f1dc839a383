"""The bench of weight transfer on a rank."""
