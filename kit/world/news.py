"""What a function on a rank reports while it still runs: the notebook asks for it twice a second, and the answer brings the rest."""

from __future__ import annotations

import json
import threading
from typing import Any

lock = threading.Lock()  # held while a report is taken and sent, so that an answer never overtakes it
_rows: list[str] = []


def publish(row: Any) -> None:
    """Report a JSON value. It reaches the caller's `on_news` in order, at the latest with the answer."""
    text = json.dumps(row)
    with lock:
        _rows.append(text)


def take() -> list[str]:
    """What was reported since the last call. The caller holds the lock."""
    rows = _rows[:]
    _rows.clear()
    return rows
