"""The probes: each starts a World of its own, has its ranks measure, and judges what they bring.

Rows that need a GPU are not measurable without one; the rest is the same on both. Limits that a row is judged by are in the row.
"""
