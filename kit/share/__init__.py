"""The desk decides which pipeline has which devices, and when. Standard library only.

`core` is the scheduler, a pure core that shares a runner with the pipelines' cores: `{"a": Member(...), "desk": Scheduler(...)}`. `planner`
makes a plan and tries it on a copy; `member` wraps a pipeline's core; `simulated` has devices on a virtual clock. `judge` has the checks of
a ledger, a second set of books that it rebuilds from the rows, and a second planner. It uses none of the desk's code.
"""
