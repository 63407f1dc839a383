"""Split: a training step that is fed in chunks gives the numbers of the plain step, for any number of chunks."""
