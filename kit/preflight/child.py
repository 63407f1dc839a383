"""One probe in a process of its own: `python -m kit.preflight.child MODULE:FUNCTION DEVICE SETTINGS`.

Its findings go to stdout, a line each; all else that is printed here goes to stderr. When the doctor is gone, so is this process, and
with it every World that it made.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback

from kit.preflight.report import Report
from kit.world import processes


def main(target: str, device: str, settings: str) -> int:
    processes.die_with_parent()
    report = Report(os.fdopen(os.dup(1), "w"))
    os.dup2(2, 1)
    module, _, name = target.partition(":")
    try:
        getattr(importlib.import_module(module), name)(report, device, json.loads(settings))
    except Exception as error:  # noqa: BLE001 - whatever it raises is what the probe found
        lines = str(error).strip().splitlines() or [""]
        first, last = lines[0].strip(), lines[-1].strip()
        words = first if first == last else f"{first} {last}"
        report.say("failed", f"{type(error).__name__}: {words}"[:600])
        traceback.print_exc()
        return 1
    report.say("done", value=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
