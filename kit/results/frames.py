"""Tables of rows: typed rows and ids from them, a job's own numbers, how much memory there is; and one table to a file of six kinds.

| kind | for | provenance |
|---|---|---|
| .csv, .json | programs: `pandas.read_csv`, `pandas.read_json` | `<file>.provenance.json` beside it |
| .parquet | programs | in the schema's metadata |
| .md | one screen: the first rows, and how many are left out | in a comment at the end |
| .tex | a paper: booktabs, with caption and label | in comments at the end |
| .html | a page that needs nothing else | a footer |

The kinds for programs keep every value: floats come back bit for bit; a missing float is empty in csv and null in json. Spreadsheets
open csv too: a text that looks like a formula gets a `'` in front, and a number without a unit has the unit "none", which pandas does
not take for a missing value. The kinds for people round numbers and write units beside them.
"""

from __future__ import annotations

import functools
import html
import json
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from kit.errors import BadInput
from kit.results.records import (
    COLUMNS,
    NOTEBOOK,
    OPTIONAL,
    Id,
    Row,
    label,
    output_file,
    replacing,
    to_json,
    typed,
    user_path,
    write_json,
    write_text,
)
from kit.results.units import ROW, amount

if TYPE_CHECKING:
    import pandas as pd


# -- from a table back to typed rows -----------------------------------------------------------------------------------


@functools.lru_cache(maxsize=2**15)
def read_ids(text: str) -> Mapping[str, Id]:
    """The ids of a row of a table, where they are JSON text. Many rows have the same ids, and many checks read the same rows."""
    return typed(json.loads(text)) if text else {}


def rows_of(frame: pd.DataFrame) -> list[Row]:
    """The rows of a table, typed. A value that is NaN in the table is None: a table does not tell NaN from null."""
    columns = (frame[name].tolist() for name in COLUMNS)
    return [
        Row(
            run=run,
            lab=lab,
            cycle=cycle,
            phase=phase,
            rank=rank,
            metric=metric,
            value=None if math.isnan(value) else value,
            unit=unit,
            time=when,
            text=text,
            ids=read_ids(ids),
            start=None if math.isnan(start) else start,
        )
        for run, lab, cycle, phase, rank, metric, value, unit, when, text, ids, start in zip(*columns, strict=True)
    ]


def event_rows(frame: pd.DataFrame) -> pd.DataFrame:
    """The rows that are events or commands: they have neither a value nor a unit. A lab of the kit writes its events on the notebook side,
    without a text. An event of another system may have one."""
    rows = frame[frame["value"].isna() & (frame["unit"] == "")]
    own = rows["rank"] == NOTEBOOK
    return rows[own & (rows["text"].fillna("") == "")] if own.any() else rows


def events_of(frame: pd.DataFrame, phase: str | None = None) -> list[Row]:
    """The events of a table, of one phase or of all."""
    rows = event_rows(frame)
    return rows_of(rows if phase is None else rows[rows["phase"] == phase])


def with_ids(frame: pd.DataFrame, *names: str) -> pd.DataFrame:
    """The rows that have all of these ids, each id as a column: `with_ids(frame, "bucket", "tensor")`."""
    if taken := [name for name in names if name in frame.columns]:
        raise ValueError(f"the table has a column {taken[0]!r} already")
    known = {text: ids for text in frame["ids"].unique() if {*names} <= (ids := read_ids(text)).keys()}
    rows = frame[frame["ids"].isin(list(known))]
    columns: dict[str, list[Any]] = {name: [known[text][name] for text in rows["ids"]] for name in names}
    return rows.assign(**columns)


def labels(frame: pd.DataFrame) -> list[str]:
    return [label(metric, read_ids(ids)) for metric, ids in zip(frame["metric"], frame["ids"], strict=True)]


def without_empty(frame: pd.DataFrame) -> pd.DataFrame:
    """The table without those of the columns text, ids and start that no row has."""
    empty = [name for name in OPTIONAL if name in frame and (frame[name].isna() | (frame[name] == "")).all()]
    return frame.drop(columns=empty)


# What phases measure by themselves; the rest of a job's numbers are its own.
OF_PHASES = {
    *(
        "seconds",
        "overhead_seconds",
        "observers_seconds",
        "failed",
        "lost_records",
        "groups",
        "fds",
        "sockets",
        "threads",
    ),
    *("rss", "anon_rss", "shared_rss", "peak_rss", "file_rss", "shm_rss", "allocated", "reserved", "peak_allocated"),
    *("driver_used", "process_used", "pinned_bytes", "memfds", "shared_maps", "shared_bytes", "shm_files"),
    *("temp_files", "children"),
}


def own_numbers(frame: pd.DataFrame) -> pd.DataFrame:
    """The numbers that a job recorded itself, such as losses."""
    own = ~frame["metric"].str.removesuffix("_before").isin(OF_PHASES) & (frame["value"].abs() < math.inf)
    return frame[own & (frame["rank"] >= 0)]


def summary_of(frame: pd.DataFrame) -> pd.DataFrame:
    """A row for each own number over all ranks: how many there are, the first, the last and the ends."""
    groups = own_numbers(frame).groupby(["phase", "metric", "unit"], sort=False)["value"]
    return groups.agg(["count", "first", "last", "min", "max"]).reset_index().rename(columns={"count": "n"})


# -- which records measure memory: the driver's on CUDA, the kernel's on the CPU --------------------------------------

GPU = "gpu"  # recorded once a run: the number of the GPU that a rank works on


class Source(NamedTuple):
    """A metric, its label, and for ranks that share a GPU the GPU that a rank's number is about."""

    metric: str
    label: str
    gpu_of: Mapping[int, int]

    @property
    def owner(self) -> str:
        return "GPU" if self.gpu_of else "rank"

    @property
    def sharers(self) -> Mapping[int, int]:
        return Counter(self.gpu_of.values())


def gpu_numbers(frame: pd.DataFrame) -> dict[int, int]:
    rows = frame[(frame["metric"] == GPU) & (frame["value"].abs() < math.inf)]
    return dict(zip(rows["rank"].astype(int), rows["value"].astype(int), strict=True))


def sharing(frame: pd.DataFrame) -> int:
    """The most ranks that share a GPU; 1 where each has its own, or none."""
    return max(Counter(gpu_numbers(frame).values()).values(), default=1)


def source(frame: pd.DataFrame) -> Source:
    """The driver on CUDA, the kernel on the CPU. For a shared GPU the driver's number per process, if it always gave one."""
    used, sharers = (frame["metric"] == "driver_used").sum(), sharing(frame)
    if used and sharers > 1 and (frame["metric"] == "process_used").sum() != used:
        return Source("driver_used", f"driver_used of the GPU, shared by {sharers} ranks", gpu_numbers(frame))
    metric = "anon_rss" if not used else "driver_used" if sharers == 1 else "process_used"
    return Source(metric, metric, {})


# -- one table to a file of six kinds ------------------------------------------------------------------------------------

PROGRAMS = (".csv", ".parquet", ".json")
SUFFIXES = (*PROGRAMS, ".md", ".tex", ".html")
METADATA = b"lifecycle-kit.provenance"
SCREEN = 40  # rows of a table in Markdown; a table in LaTeX that is longer breaks over pages
WORDS = 50  # characters of a cell in LaTeX; a column with longer ones breaks its lines
FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n")
PASSED = {True: "pass", False: "FAIL"}
TEX = str.maketrans(
    {character: f"\\{character}" for character in "_&%#${}"}
    | {"\\": r"\textbackslash{}", "^": r"\textasciicircum{}", "~": r"\textasciitilde{}", "\n": " ", "\r": " "}
)


def export(
    frame: pd.DataFrame,
    provenance: Mapping[str, Any],
    path: str | Path,
    *,
    units: Mapping[str, str] | None = None,
    title: str = "",
) -> Path:
    """Write the table to `path`; its ending is the kind. The file is whole or not there.

    `units` are the units of columns; ROW is the unit that the row's own column `unit` names.
    """
    kind = known_suffix(path)
    target = output_file(path)
    if kind == ".parquet":
        import pyarrow as pa
        import pyarrow.parquet as pq

        written = pa.Table.from_pandas(frame, preserve_index=False)
        written = written.replace_schema_metadata({**written.schema.metadata, METADATA: to_json(provenance).encode()})
        with replacing(target) as temporary:
            pq.write_table(written, temporary)
    elif kind in {".csv", ".json"}:
        text = _guarded(frame).to_csv(index=False, lineterminator="\n") if kind == ".csv" else to_json(json_rows(frame))
        write_text(target, text)
        write_json(target.with_name(f"{target.name}.provenance.json"), provenance)
    else:
        table = readable(without_empty(frame), units or {})
        write_text(target, _for_people(kind, table, provenance, title or target.stem, target.stem))
    return target


def known_suffix(path: str | Path, also: Sequence[str] = ()) -> str:
    """The ending of a file's name, one of those of tables or of others that are `also` allowed."""
    kind = user_path(path).suffix.lower()
    if kind not in (allowed := (*SUFFIXES, *also)):
        raise BadInput(f"{Path(path).name!r} has no known ending; allowed are {', '.join(allowed)}")
    return kind


def json_rows(frame: pd.DataFrame) -> list[dict[str, Any]]:
    rows = frame.astype(object).where(frame.notna(), None).to_dict("records")
    return [{str(key): item for key, item in row.items()} for row in rows]


def readable(frame: pd.DataFrame, units: Mapping[str, str]) -> pd.DataFrame:
    """Every cell as people read it: numbers rounded, with their unit beside them and not in a separate column."""
    made = frame.astype(object)
    for name in frame:
        unit = units.get(str(name), "")
        of_rows = frame["unit"] if unit == ROW else [unit] * len(frame)
        made[name] = [_cell(str(name), item, of) for item, of in zip(frame[name].tolist(), of_rows, strict=True)]
    made.attrs["right"] = [name in units or frame[name].dtype.kind in "if" for name in frame]
    if ROW in units.values():
        made.attrs["right"].pop(list(frame).index("unit"))
        made = made.drop(columns="unit")
    return made


def _cell(name: str, item: Any, unit: str) -> str:
    if item is None or item != item:  # noqa: PLR0124 - NaN is the one value that differs from itself
        return "-" if name == "passed" or unit else ""
    if isinstance(item, float):
        item = item if item.is_integer() or abs(item) >= 1e6 else float(f"{item:.4g}")
        return amount(item, unit) if unit or abs(item) < 1e6 else f"{item:.3f}"
    return PASSED[item] if name == "passed" else str(item)


def _guarded(frame: pd.DataFrame) -> pd.DataFrame:
    texts = {
        str(name): [f"'{item}" if isinstance(item, str) and item.startswith(FORMULA) else item for item in frame[name]]
        for name in frame
        if frame[name].dtype.kind not in "if"
    }
    if "unit" in texts:
        texts["unit"] = ["none" if item in {"", "1"} else item for item in texts["unit"]]
    return frame.assign(**texts)


def _for_people(kind: str, texts: pd.DataFrame, provenance: Mapping[str, Any], title: str, stem: str) -> str:
    """Markdown, LaTeX (to be \\input; it needs booktabs, and longtable for a long table) or an HTML page; all escaped."""
    import pandas as pd

    about = to_json(provenance, indent=1)
    if kind == ".html":
        with pd.option_context("display.max_colwidth", None):
            table = texts.to_html(index=False, border=0)
        return (
            f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title></head><body>\n'
            f"{table}\n<footer><h2>Provenance</h2><pre>{html.escape(about)}</pre></footer>\n</body></html>\n"
        )
    right, texts = texts.attrs["right"], texts.replace("[\r\n]", " ", regex=True)
    if kind == ".tex":
        widths = [max(map(len, texts[name]), default=0) for name in texts]
        table = texts.to_latex(
            index=False,
            escape=True,
            longtable=len(texts) > SCREEN,
            column_format="".join(
                "r" if is_number else "l" if widest <= WORDS else r"p{0.4\linewidth}"
                for is_number, widest in zip(right, widths, strict=True)
            ),
            caption=title.translate(TEX),
            label=f"tab:{re.sub(r'[^a-zA-Z0-9:.-]+', '-', stem)}",
        )
        return "\n".join([f"{table}% Provenance:", *(f"% {line}" for line in about.splitlines())]) + "\n"
    shown = texts.head(SCREEN).replace(r"([\\|`*_<>\[\]])", r"\\\1", regex=True)
    sides = ["right" if is_number else "left" for is_number in right]
    table = shown.to_markdown(index=False, disable_numparse=True, colalign=sides)
    left = f"\n{len(texts) - SCREEN} more rows; csv, html and tex have all of them.\n" if len(texts) > SCREEN else ""
    comment = about.replace("--", "-\\u002d")  # as JSON has it too: nothing inside a comment may end it
    return f"{table}\n{left}\n<!-- Provenance:\n{comment}\n-->\n"
