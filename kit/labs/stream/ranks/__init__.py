"""The ranks of the lab `stream`: the trainer and the replicas of a loop, with what only this lab measures and recomputes."""
