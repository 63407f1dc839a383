"""The desk: which pipeline has which devices, and when. Standard library only.

`core` is the scheduler, a pure core beside those of the pipelines in one runner: `{"a": Member(...), "desk": Scheduler(...)}`. `planner`
makes a plan, `validator` tries it on a copy, `operations` are what pipelines may ask; `member` wraps a pipeline's core, `simulated` is
devices on a virtual clock, `judge` the checks of a ledger, `specified` the planner that they compare with.
"""
