"""The desk: which pipeline has which devices, and when. Standard library only.

`core` is the scheduler, a pure core beside those of the pipelines in one runner: `{"a": Member(...), "desk": Scheduler(...)}`. `planner`
makes a plan and tries it on a copy; `member` wraps a pipeline's core, `simulated` is devices on a virtual clock. `judge` has the checks of
a ledger, and `books` what follows from its rows, with a second planner; neither uses code of the desk. `broken` has the faults.
"""
