"""Weights from trainer ranks to inference ranks: packed, versioned, sent and checked. Standard library, torch and numpy only."""
