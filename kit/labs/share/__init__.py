"""Share: two RL pipelines take turns on the same devices, under a scheduler that is checked from outside."""
