"""What a run came to, in numbers that another run of the same job must meet to the last bit."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

EXACT_BITS = 53  # of a whole number in a record


def digest(hashes: Mapping[str, str]) -> int:
    """All of a rank's tensors in one number: the hash of their names and hashes, cut to what a record keeps exactly."""
    text = "\n".join(f"{name} {value}" for name, value in sorted(hashes.items()))
    return int.from_bytes(hashlib.sha256(text.encode()).digest(), "big") >> (256 - EXACT_BITS)
