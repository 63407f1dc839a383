"""The offload lab on a rank: the job, the releaser, the observers, and what fails on purpose or by a known bug."""
