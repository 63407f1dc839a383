"""The split lab on a rank: phases, the code under test with its faults, and oracles."""
