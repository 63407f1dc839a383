"""The offload lab on a rank: the job, the releaser with its faults, and observers."""
