"""Making a run: its folder, its id, and what is written into it while it is running."""

from __future__ import annotations

import os
import secrets
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kit.errors import BadInput, KitError
from kit.results.files import write_json
from kit.results.records import PATTERN, SCHEMA, Record, RecordWriter, utc
from kit.version import kit_version

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kit.results.verdict import Verdict


class RunWriter:
    """The one process that owns a run's folder. The status stays `running` until `finish` or `fail` is called."""

    def __init__(self, folder: Path, info: dict[str, Any]) -> None:
        self.dir = folder
        self.id = str(info["run"])
        self.lab = str(info["lab"])
        self._info = info
        (folder / "logs").mkdir(exist_ok=True)
        write_json(folder / "run.json", info)
        self._records = RecordWriter(folder / "records.jsonl")

    def append(self, records: Sequence[Record]) -> None:
        self._records.append(records)

    def set_provenance(self, provenance: Mapping[str, Any]) -> None:
        """Replace the provenance: the ranks' part of it arrives after the folder was made."""
        self._update(provenance=dict(provenance))

    def write_verdict(self, verdict: Verdict) -> None:
        verdict.write(self.dir / "verdict.json")

    def finish(self) -> None:
        self._end(status="finished")

    def fail(self, error: str) -> None:
        self._end(status="failed", error=error)

    def _end(self, **fields: Any) -> None:
        self._records.close()
        self._update(finished=utc(), **fields)

    def _update(self, **fields: Any) -> None:
        self._info |= fields
        write_json(self.dir / "run.json", self._info)


def create_run(
    runs_dir: str | Path,
    lab: str,
    config: Mapping[str, Any],
    provenance: Mapping[str, Any],
    *,
    out: str | Path | None = None,
    fault: str | None = None,
) -> RunWriter:
    """Make a run folder, `out` or a new one in `runs_dir`. A folder that cannot be written is a `BadInput`."""
    stamp = f"{datetime.now().astimezone():%Y%m%d-%H%M%S}"
    folder = None
    while folder is None:
        identity = f"{lab}-{stamp}-{secrets.token_hex(2)}"
        folder = _make_folder(Path(runs_dir) / identity if out is None else Path(out), exist_ok=out is not None)
    if (folder / "run.json").exists() or any(folder.glob(PATTERN)):
        raise BadInput(f"{folder} already holds a run; choose another folder")
    info = {
        "run": identity,
        "lab": lab,
        "config": dict(config),
        "status": "running",
        "started": utc(),
        "finished": None,
        "fault": fault,
        "error": None,
        "provenance": dict(provenance),
        "kit": kit_version(),
        "schema": SCHEMA,
    }
    try:
        return RunWriter(folder, info)
    except (OSError, KitError) as error:
        raise BadInput(f"cannot write a run to {folder}: {error}") from error


def runs_dir() -> Path:
    """Where runs go: KIT_RUNS, else `runs` beside the kit's own pyproject.toml, else the user's data folder."""
    chosen = os.environ.get("KIT_RUNS")
    if chosen:
        return Path(chosen).expanduser().absolute()
    checkout = Path(__file__).resolve().parents[2]
    if (checkout / "pyproject.toml").is_file():
        return checkout / "runs"
    return Path.home() / ".local" / "share" / "lifecycle-kit" / "runs"


def _make_folder(folder: Path, *, exist_ok: bool) -> Path | None:
    """The folder, or None where another run took the name first."""
    folder = folder.expanduser().absolute()
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        if exist_ok and folder.is_dir():
            return folder
        folder.mkdir()
    except FileExistsError as error:
        if folder.is_dir():
            return None
        raise BadInput(f"cannot make a run folder at {folder}: {error.filename} is a file") from error
    except OSError as error:
        raise BadInput(f"cannot make a run folder at {folder}: {error.strerror}") from error
    return folder
