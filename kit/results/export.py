"""One table to a file of six kinds, with its provenance; three of the kinds read back exactly as they were.

| kind | provenance | reads back |
|---|---|---|
| .csv | `<file>.provenance.json` beside it | yes |
| .parquet | in the schema's metadata | yes |
| .json | {"provenance", "records"} | yes |
| .md, .html | a footer | no |
| .tex | comments at the end | no |

Floats are written with as many digits as they need to come back bit for bit. A missing float is empty in csv and null
in json. Text is never missing: an empty string is an empty string. In csv, columns other than a record's nine get
their type back from how they look.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from kit.errors import BadInput
from kit.results.files import need_folder, read_json, replacing, to_json, write_json, write_text
from kit.results.records import COLUMNS, TYPES
from kit.results.tables import html_page, markdown, tex

if TYPE_CHECKING:
    from collections.abc import Mapping

    import pandas as pd

SUFFIXES = (".csv", ".parquet", ".md", ".tex", ".html", ".json")
READABLE = (".csv", ".parquet", ".json")
METADATA = b"lifecycle-kit.provenance"


class Exported(NamedTuple):
    """A table that was read back, and where it came from."""

    frame: pd.DataFrame
    provenance: dict[str, Any]


def export(frame: pd.DataFrame, provenance: Mapping[str, Any], path: str | Path) -> Path:
    """Write the table to `path`; its ending says how. The file is whole or not there."""
    target = Path(path).expanduser()
    kind = _kind(target, SUFFIXES)
    need_folder(target)
    if kind == ".csv":
        write_json(_beside(target), provenance)
        write_text(target, frame.to_csv(index=False, lineterminator="\n"))
    elif kind == ".parquet":
        _write_parquet(frame, provenance, target)
    elif kind == ".json":
        write_text(target, to_json({"provenance": provenance, "records": _plain(frame)}) + "\n")
    else:
        writer = {".md": markdown, ".tex": tex, ".html": html_page}[kind]
        write_text(target, writer(frame, to_json(provenance, indent=1), target.stem))
    return target


def read_export(path: str | Path) -> Exported:
    """Read back a csv, parquet or json file that `export` wrote."""
    source = Path(path).expanduser()
    kind = _kind(source, READABLE)
    if not source.is_file():
        raise BadInput(f"there is no file {source}")
    if kind == ".csv":
        beside = _beside(source)
        return Exported(_read_csv(source), read_json(beside) if beside.exists() else {})
    return _read_parquet(source) if kind == ".parquet" else _read_json(source)


def _kind(path: Path, allowed: tuple[str, ...]) -> str:
    kind = path.suffix.lower()
    if kind not in allowed:
        raise BadInput(f"{path.name!r} has no known ending; allowed are {', '.join(allowed)}")
    return kind


def _beside(path: Path) -> Path:
    return path.with_name(path.name + ".provenance.json")


def _plain(frame: pd.DataFrame) -> list[dict[str, Any]]:
    rows = frame.to_dict("records")
    return [{str(key): None if item != item else item for key, item in row.items()} for row in rows]  # noqa: PLR0124 - NaN is the one value that differs from itself


def _write_parquet(frame: pd.DataFrame, provenance: Mapping[str, Any], target: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.Table.from_pandas(frame, preserve_index=False)
    table = table.replace_schema_metadata({**table.schema.metadata, METADATA: to_json(provenance).encode()})
    with replacing(target) as temporary:
        pq.write_table(table, temporary)


def _read_parquet(source: Path) -> Exported:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(source)
    except pa.ArrowInvalid as error:
        raise BadInput(f"{source} is damaged: it is not a parquet file ({error})") from error
    return Exported(table.to_pandas(), json.loads((table.schema.metadata or {}).get(METADATA, b"{}")))


def _read_json(source: Path) -> Exported:
    data = read_json(source)
    if not isinstance(data, dict) or set(data) != {"provenance", "records"}:
        raise BadInput(f"{source} is not an exported table: it must be a JSON object with provenance and records")
    return Exported(_table(data["records"]), data["provenance"])


def _table(records: list[dict[str, Any]]) -> pd.DataFrame:
    import pandas as pd

    names = list(records[0]) if records else COLUMNS
    return pd.DataFrame({name: _typed(name, [row[name] for row in records]) for name in names})


def _read_csv(source: Path) -> pd.DataFrame:
    import pandas as pd

    text = pd.read_csv(source, dtype="str", keep_default_na=False, lineterminator="\n")
    return pd.DataFrame({name: _typed(name, list(text[name])) for name in text.columns})


def _typed(name: str, items: list[Any]) -> pd.Series[Any]:
    """The column in its type: known by name, else the first of whole number, float and text that takes every item."""
    import pandas as pd

    for kind in [TYPES[name]] if name in TYPES else ["int64", "float64", "str"]:
        if kind == "str":
            break
        try:
            return pd.Series([_number(item, kind) for item in items], dtype=kind)
        except ValueError:
            continue
    return pd.Series(items, dtype="str")


def _number(item: Any, kind: str) -> float | int:
    if kind == "int64":
        if isinstance(item, float) or item is None:
            raise ValueError
        return int(item)
    return float("nan") if item in {None, ""} else float(item)
