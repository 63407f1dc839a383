"""Weights from trainer ranks to inference ranks: packed, versioned, carried over, checked. Standard library, torch and numpy only."""
