"""Stream: asynchronous RL under a single controller, with the weight version of every token recomputed."""
