"""The sync lab on a rank: phases of the trainer and of replicas, and the lab's own observation."""
