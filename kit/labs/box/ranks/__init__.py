"""The preflight on a rank."""
