"""The actors of a loop on their ranks: a trainer and replicas, each a single-threaded object that does one call after another.

`trainer` and `replica` are whole actors, `samples` is what goes between them, and `common` what both need. A lab has such an actor, or
extends it with what it measures. This room knows no lab.
"""
