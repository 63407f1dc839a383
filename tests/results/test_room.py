"""What this room promises as a whole: it is light to import, and quick enough for long runs."""

from __future__ import annotations

import subprocess
import sys


def test_importing_the_room_loads_nothing_heavy():
    code = "import sys, kit.results; print([m for m in ('torch', 'numpy', 'pandas', 'matplotlib') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
