"""Random-looking numbers that depend on their key alone.

There is no generator and no state: the order of calls, the other requests and a restart change nothing. Equal keys give equal numbers on
every machine.
"""

from __future__ import annotations

import hashlib

Part = int | str | tuple[int, ...]


def uniform(*key: Part) -> float:
    """A number in [0, 1) with 53 random bits, from a hash of the key."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "big") >> 11) * 2.0**-53


def whole(low: int, high: int, *key: Part) -> int:
    """A whole number from low to high, both included."""
    return low + int(uniform(*key) * (high - low + 1))
