"""Side-by-side measurements: what the kit does, its limits, and other tools in the same run.

A bench is a module here with `main(as_json) -> int`; `kit bench NAME` finds it by that. It makes `Row`s (`rows.py`) and tells them
(`report.py`). A limit that is not met is told as it is: a bench measures, it does not judge, and ends with 0.
"""
