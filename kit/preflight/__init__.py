"""`kit doctor --deep`: ten probes that settle in two minutes what reading sources cannot.

`run` gives each probe a fresh process, a limit and a line; `probes` is what that process does with a World, `onranks` is what ranks do
for it. A probe measures and says pass, fail or not measurable, with a number and a reason.
Ranks load this package for `onranks`, so it imports nothing itself.
"""
