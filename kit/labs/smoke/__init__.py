"""Smoke: the smallest lab. It creates process groups, all-reduces over them, destroys them, and counts what is left."""
