"""Side-by-side measurements: what the kit does, its limits, and other tools in the same run. `session` has the frame of every bench."""
