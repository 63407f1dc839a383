"""Box: the preflight. Probes on live ranks measure what a box can do, each in its own phase."""
