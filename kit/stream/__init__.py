"""The controller of an asynchronous RL loop: who may start, what is trained, what is too old, when weights move. Standard library only.

`settings` are its settings, `core` the state machine, `samplers` the rules of staleness, `simulated` a whole system on a virtual clock.
Versions count from 0, the base: `version` rises by one with each outer step, `updates` with each optimizer step.
"""
