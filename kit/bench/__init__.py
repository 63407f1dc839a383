"""Side-by-side measurements: what the kit does, its limits, and other tools in the same run.

A bench is a module here with `Sizes`, `QUICK` and `parts(sizes, device)`; `kit bench NAME` finds it by that and `session.conduct` runs it.
A part gives `Row`s (`rows.py`), each of which is on disk as soon as it is given. A limit that is not met is reported as it is: a bench
measures, it does not judge, and ends with 0.
"""
