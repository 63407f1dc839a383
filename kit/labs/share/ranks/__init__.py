"""The ranks of the lab `share`: the trainers and the replicas of its pipelines, the devices that they lease, and their observer."""
