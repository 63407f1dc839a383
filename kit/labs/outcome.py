"""What a run came to, in a digest that another run of the same job must meet to the last bit."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


def digest(hashes: Mapping[str, str]) -> str:
    """The SHA-256 of all of a rank's tensors: of their names and hashes."""
    text = "\n".join(f"{name} {value}" for name, value in sorted(hashes.items()))
    return hashlib.sha256(text.encode()).hexdigest()
