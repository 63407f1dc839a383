"""Writes constraints.txt: the versions that pip resolves for `.[dev,hf,log]`, from each Python named on the command line.

One file serves all of them. A line has a marker only if versions differ between Pythons; the newest Python's line also holds
for newer ones. Nothing is installed. Local versions (`+cpu`) are removed, so that the machine's package index decides which build
of torch is installed.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent.parent
# Not resolved to the newest version: raised by hand after the labs were tried with it.
HELD = ["torch==2.13.0"]
HEAD = """\
# A set of versions that is known to work, for every Python named in a marker. Written by `make pins` from pyproject.toml,
# which is the one list of dependencies; do not edit. `make env` and environment.yml install with it.
"""


def resolve(python: str) -> tuple[tuple[int, int], dict[str, str]]:
    """The Python's version, and name -> version of everything that pip would install with it."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        pip = [Path(folder) / "venv/bin/python", "-m", "pip"]  # a new environment: a dry run omits installed packages
        subprocess.run([python, "-m", "venv", Path(folder) / "venv"], check=True)
        dry = [*pip, "install", "--dry-run", "--quiet", "--report", report]
        subprocess.run([*dry, ".[dev,hf,log]", *HELD], cwd=HERE, check=True)
        found = json.loads(report.read_text())
    major, minor = found["environment"]["python_version"].split(".")
    pins = {}
    for item in found["install"]:
        name = item["metadata"]["name"].lower().replace("_", "-").replace(".", "-")
        pins[name] = item["metadata"]["version"].split("+")[0]
    del pins["lifecycle-kit"]
    return (int(major), int(minor)), pins


def merge(resolved: dict[tuple[int, int], dict[str, str]]) -> list[str]:
    """The lines of the constraints file."""
    versions = sorted(resolved)
    lines = []
    for name in sorted(set().union(*resolved.values())):
        pins = {version: resolved[version][name] for version in versions if name in resolved[version]}
        if len(set(pins.values())) == 1:
            lines.append(f"{name}=={next(iter(pins.values()))}")
            continue
        for (major, minor), pin in pins.items():
            comparison = ">=" if (major, minor) == versions[-1] else "=="
            lines.append(f'{name}=={pin} ; python_version {comparison} "{major}.{minor}"')
    return lines


def main(pythons: list[str]) -> None:
    resolved = dict(resolve(python) for python in pythons)
    (HERE / "constraints.txt").write_text(HEAD + "\n".join(merge(resolved)) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
