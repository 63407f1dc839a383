"""Box: the preflight. Probes on live ranks measure what a box can do, each in a phase of its own."""
