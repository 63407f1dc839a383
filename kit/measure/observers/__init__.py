"""Observers watch a rank from outside, between phases, and never ask the code under test.

births     every process group that is made, by whatever code and behind whatever wrapper; which group a collective reaches; functions of
           other modules that were replaced
tensors    the training state, found by walking objects: bytes by kind, digests, what shares memory with what; random generators

What the process holds (shared memory, files, child processes, memory of every kind) is in kit/measure/phase.py.
Inside a phase only clocks and counters run. The cost of an observer is recorded with the phase before it.
"""
