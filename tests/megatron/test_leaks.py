"""Twenty cycles at four ranks leave nothing behind."""

import pytest

CYCLES = 20
MIB = 2**20


@pytest.mark.slow
def test_twenty_cycles_leak_nothing(launch):
    for rank in launch("leaks", 4, str(CYCLES)):
        cycles = rank["cycles"]
        assert len(cycles) == CYCLES
        for source in ("groups", "sockets", "threads", "fds"):
            assert len({cycle["released"][source] for cycle in cycles}) == 1, source
            back = [cycle["back"][source] for cycle in cycles]
            # Gloo may still be closing a socket of the handshake when sockets are counted; a leak would grow.
            assert max(back[CYCLES // 2 :]) <= max(back[: CYCLES // 2]), source
        assert all(cycle["alive"] == [] for cycle in cycles)
        assert rank["dead"] == []
        assert cycles[-1]["anon"] - cycles[2]["anon"] < 20 * MIB
