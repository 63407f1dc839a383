"""The smoke lab on a rank."""
