"""A process that runs the kit's commands and pytest for `mechanical.py`, so that a mutant does not pay for the imports of a new one.

    python -m tests.mutants.kept fork    each command in a fork of a process that has imported only what is not the kit
    python -m tests.mutants.kept stay    all commands in one process, with Worlds that its waiting agent forks

A line of JSON with the command's words comes in; one with its status and the end of its output goes out. `fork` is for code that runs on
the notebook side: each command imports the kit's files as they are then. `stay` is for code on ranks, which import those files themselves.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

OTHERS = ("numpy", "pandas", "torch", "IPython", "matplotlib", "pyarrow", "megatron.core", "pytest")
KEPT = 20_000  # characters of a command's output


def command(words: list[str]) -> dict[str, Any]:
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        try:
            if words[0] == "pytest":
                status = int(importlib.import_module("pytest").main(words[1:]))
            elif words[0] == "explore":
                status = explored(words[1], words[2:])
            else:
                status = importlib.import_module("kit.cli").main(words)
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else 1
        except BaseException as error:  # noqa: BLE001 - whatever a mutant raises is its outcome
            status = 3
            print(f"{type(error).__name__}: {error}")
    return {"status": status, "text": output.getvalue()[-KEPT:]}


def explored(lab: str, words: list[str]) -> int:
    """As the command does, but a failure is not made small."""
    given = [*zip(words[::2], words[1::2], strict=True)]
    settings = dict(value.split("=", 1) for option, value in given if option == "--set")
    seeds = int(dict(given)["--seeds"])
    done = importlib.import_module("kit.exploration").explore(lab, seeds, shrinks=False, jobs=1, **settings)
    failed = sorted({name for outcome in done.outcomes for name in outcome.findings})
    print(", ".join(failed))
    return int(bool(failed))


def forked(words: list[str]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer"
        pid = os.fork()
        if not pid:
            answer.write_text(json.dumps(command(words)))
            sys.stdout.flush()
            os._exit(0)
        os.waitpid(pid, 0)
        return json.loads(answer.read_text()) if answer.exists() else {"status": 3, "text": "the process is gone"}


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what ranks print is no answer
    if sys.argv[1] == "fork":
        for name in OTHERS:
            with contextlib.suppress(ImportError):
                importlib.import_module(name)
    run = {"fork": forked, "stay": command}[sys.argv[1]]
    for line in sys.stdin:
        answers.write(json.dumps(run(json.loads(line))) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
