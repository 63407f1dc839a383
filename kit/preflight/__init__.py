"""`kit doctor --deep`: ten probes that determine in two minutes what this box can do.

`run` gives each probe a fresh process, a time limit and an output line; `probes` runs in that process with a World, `onranks` on the ranks.
A probe measures and reports pass, fail or not measurable, with a number and a reason.
Ranks load this package for `onranks`, so it imports nothing.
"""
