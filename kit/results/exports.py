"""One table to a file of six kinds, with its provenance.

| kind | provenance |
|---|---|
| .csv | `<file>.provenance.json` beside it |
| .parquet | in the schema's metadata |
| .json | {"provenance", "records"} |
| .md, .html | a footer |
| .tex | comments at the end |

csv, parquet and json keep every value: floats have as many digits as they need to come back bit for bit, a missing float is empty in
csv and null in json, and an empty text is empty. The kinds for people leave out a record's text, ids and start where no row has them.
"""

from __future__ import annotations

import html
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kit.errors import BadInput
from kit.results.files import need_folder, replacing, to_json, write_json, write_text
from kit.results.frames import without_empty

if TYPE_CHECKING:
    from collections.abc import Mapping

    import pandas as pd

SUFFIXES = (".csv", ".parquet", ".md", ".tex", ".html", ".json")
METADATA = b"lifecycle-kit.provenance"


def export(frame: pd.DataFrame, provenance: Mapping[str, Any], path: str | Path) -> Path:
    """Write the table to `path`; its ending says how. The file is whole or not there."""
    target = Path(path).expanduser()
    kind = target.suffix.lower()
    if kind not in SUFFIXES:
        raise BadInput(f"{target.name!r} has no known ending; allowed are {', '.join(SUFFIXES)}")
    need_folder(target)
    if kind == ".csv":
        write_json(target.with_name(f"{target.name}.provenance.json"), provenance)
        write_text(target, frame.to_csv(index=False, lineterminator="\n"))
    elif kind == ".parquet":
        _write_parquet(frame, provenance, target)
    elif kind == ".json":
        write_text(target, to_json({"provenance": provenance, "records": _plain(frame)}) + "\n")
    else:
        write_text(target, _for_people(kind, without_empty(frame), to_json(provenance, indent=1), target.stem))
    return target


def _plain(frame: pd.DataFrame) -> list[dict[str, Any]]:
    rows = frame.to_dict("records")
    return [{str(key): None if _missing(item) else item for key, item in row.items()} for row in rows]


def _missing(item: Any) -> bool:
    return item is None or bool(item != item)  # noqa: PLR0124 - NaN is the one value that differs from itself


def _write_parquet(frame: pd.DataFrame, provenance: Mapping[str, Any], target: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.Table.from_pandas(frame, preserve_index=False)
    table = table.replace_schema_metadata({**table.schema.metadata, METADATA: to_json(provenance).encode()})
    with replacing(target) as temporary:
        pq.write_table(table, temporary)


def _for_people(kind: str, frame: pd.DataFrame, provenance: str, title: str) -> str:
    """Markdown, LaTeX (a longtable to be \\input, which needs booktabs too) or an HTML page that needs nothing else; all escaped."""
    import pandas as pd

    lines = provenance.splitlines()
    texts = frame.map(lambda item: "" if _missing(item) else str(item)).astype("str")
    if kind == ".html":
        with pd.option_context("display.max_colwidth", None):
            table = texts.to_html(index=False, border=0)
        return (
            f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title></head><body>\n'
            f"{table}\n<footer><h2>Provenance</h2><pre>{html.escape(provenance)}</pre></footer>\n</body></html>\n"
        )
    texts = texts.replace("[\r\n]", " ", regex=True)
    if kind == ".tex":
        columns = "".join("r" if one.kind in "if" else "l" for one in frame.dtypes)
        table = texts.to_latex(index=False, escape=True, longtable=True, column_format=columns)
        return "\n".join([f"{table}% Provenance:", *(f"% {line}" for line in lines)]) + "\n"
    table = texts.replace(r"([\\|`*_<>\[\]])", r"\\\1", regex=True).to_markdown(index=False, disable_numparse=True)
    # An indented block, which nothing inside it can end.
    return "\n".join([table, "", "Provenance:", "", *(f"    {line}" for line in lines)]) + "\n"
