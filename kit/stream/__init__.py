"""The controller of an asynchronous RL loop, its samplers, and the checks of its ledger. Standard library only."""
