from __future__ import annotations

import json
import math
import struct
from html.parser import HTMLParser

import pandas as pd
import pytest

from kit.errors import BadInput, KitError
from kit.results import Row, Run, VerdictRow, compare, export, to_frame, with_ids
from kit.results.frames import events_of, rows_of
from kit.results.units import ROW
from kit.results.verdict import Verdict
from tests.results.conftest import read_back


def test_an_event_of_another_system_may_have_a_text_and_an_observers_row_is_no_event() -> None:
    def row(rank: int, metric: str, text: str = "", value: float | None = None, unit: str = "") -> Row:
        return Row(metric=metric, rank=rank, text=text, value=value, unit=unit, time=1.0)

    foreign = [row(0, "sent"), row(0, "failed", "out of memory"), row(0, "seconds", value=0.5, unit="s")]
    assert [row.event for row in events_of(to_frame(foreign))] == ["sent", "failed"]
    own = [row(-1, "sent"), row(-1, "seen_cores", "0-1"), row(0, "digest", "abc"), row(-1, "completed")]
    assert [row.event for row in events_of(to_frame(own))] == ["sent", "completed"]


PROVENANCE = {"torch": "2.13", "note": 'a "quote", ```, <b>, %, ü', "nested": {"cores": 2, "none": None}}
VALUES = [
    0.1 + 0.2,
    1e-310,
    5e-324,
    1.7976931348623157e308,
    -0.0,
    3.0,
    2**53 + 0.0,
    math.nan,
    math.inf,
    -math.inf,
    None,
]
TEXTS = [
    "",
    "NA",
    "None",
    "nan",
    "007",
    "a,b",
    'say "hi"',
    "two\nlines",
    "cr\rlf\r\n",
    "zurück 計 🚀",
    " spaced ",
    "|",
    "-inf",
]


@pytest.fixture
def frame(record):
    values = [record(value=value, time=0.1 * index) for index, value in enumerate(VALUES)]
    texts = [record(phase=text, unit=text, text=text, rank=index) for index, text in enumerate(TEXTS)]
    spans = [record(ids={"tensor": text, "step": index}, start=0.1 * index) for index, text in enumerate(TEXTS)]
    return to_frame(values + texts + spans)


def bits(series):
    return [struct.pack("<d", value) for value in series]


@pytest.mark.parametrize("suffix", ["csv", "parquet", "json"])
def test_round_trip_is_exact(tmp_path, frame, suffix):
    path = export(frame, PROVENANCE, tmp_path / f"table.{suffix}")
    back, provenance = read_back(path, frame)
    pd.testing.assert_frame_equal(back, frame, check_exact=True)
    assert bits(back["value"].dropna()) == bits(frame["value"].dropna())
    assert bits(back["time"]) == bits(frame["time"])
    assert provenance == PROVENANCE


@pytest.mark.parametrize("suffix", ["csv", "parquet", "json"])
def test_an_empty_table_comes_back_empty(tmp_path, suffix):
    back, _ = read_back(export(to_frame([]), {}, tmp_path / f"t.{suffix}"), to_frame([]))
    pd.testing.assert_frame_equal(back, to_frame([]))


@pytest.mark.parametrize("suffix", ["csv", "parquet", "json"])
def test_a_comparison_round_trips_too(tmp_path, make_run, record, suffix):
    first = Run(make_run([record(), record(metric="rss", value=0.0), record(metric="old")], "a"))
    second = Run(make_run([record(value=0.7), record(metric="rss", value=1.0)], "b"))
    table = compare([first, second])
    back, _ = read_back(export(table, {}, tmp_path / f"t.{suffix}"), table)
    pd.testing.assert_frame_equal(back, table, check_exact=True)


def test_csv_is_a_pure_table_with_its_provenance_beside(tmp_path, frame):
    export(frame, PROVENANCE, tmp_path / "t.csv")
    head = (tmp_path / "t.csv").read_text().splitlines()[0]
    assert head == "run,lab,cycle,phase,rank,metric,value,unit,time,text,ids,start"
    assert json.loads((tmp_path / "t.csv.provenance.json").read_text()) == PROVENANCE


def test_json_is_strict_and_pandas_reads_it(tmp_path, frame):
    path = export(frame, PROVENANCE, tmp_path / "t.json")
    data = json.loads(path.read_text(), parse_constant=pytest.fail)
    assert [row["value"] for row in data[7:11]] == [None, "Infinity", "-Infinity", None]
    read = pd.read_json(path)
    assert list(read.columns) == list(frame.columns)
    assert read["rank"].tolist() == frame["rank"].tolist()
    assert read["value"][:3].tolist() == pytest.approx(VALUES[:3])


def test_a_csv_runs_no_formula_and_keeps_units_that_are_empty(tmp_path, record):
    texts = ["=1+1", "+1", "-1", "@sum", "\n=1", "plain"]
    rows = [record(text=text, unit=unit) for text, unit in zip(texts, ["1", "", "s", "B", "1", ""], strict=True)]
    read = pd.read_csv(export(to_frame(rows), {}, tmp_path / "t.csv"))
    assert read["text"].tolist() == ["'=1+1", "'+1", "'-1", "'@sum", "'\n=1", "plain"]
    assert read["unit"].tolist() == ["none", "none", "s", "B", "none", "none"]


def test_markdown_cells_cannot_break_the_table(tmp_path, record):
    nasty = "a|b\n<script>`*_[x](y)\\"
    about = {**PROVENANCE, "text": "--> <!-- --!>"}
    text = export(to_frame([record(phase=nasty, value=None)]), about, tmp_path / "t.md").read_text()
    rows = text.splitlines()[:3]
    assert [row.replace("\\\\", "").replace("\\|", "").count("|") for row in rows] == [10, 10, 10]
    assert r"a\|b \<script\>\`\*\_\[x\](y)\\" in rows[2]
    comment = text.split("<!-- Provenance:\n")[1].removesuffix("\n-->\n")
    assert "--" not in comment
    assert json.loads(comment) == about


def test_tables_for_people_are_rounded_and_have_units_beside_the_numbers(tmp_path, record):
    rows = [record(value=0.0123456, unit="s"), record(value=2.0**21, unit="B"), record(value=3.0, unit="1")]
    rows.append(record(value=0.0429688, unit="MiB"))
    text = export(to_frame(rows), {}, tmp_path / "t.md", units={"value": ROW}).read_text()
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()[:6]]
    assert "unit" not in cells[0]
    assert [line[cells[0].index("value")] for line in cells[2:]] == ["12.3 ms", "2.0 MiB", "3", "0.043 MiB"]


def test_markdown_is_one_screen_and_says_what_is_left_out(tmp_path, record):
    text = export(to_frame([record(rank=rank) for rank in range(100)]), {}, tmp_path / "t.md").read_text()
    assert text.count("| smoke ") == 40
    assert "\n60 more rows; csv, html and tex have all of them.\n" in text


def test_a_verdict_is_saved_by_itself(tmp_path):
    rows = [VerdictRow("fine_%", 0.5, 1.0, "s", True, "fast"), VerdictRow("leak", 3.0, 0.0, "1", False, "=3 groups")]
    verdict = Verdict([*rows, VerdictRow("gpu", None, 1.0, "B", None, "no GPU")])
    read = pd.read_csv(verdict.save(tmp_path / "made" / "v.csv"))
    assert read["check"].tolist() == ["leak", "gpu", "fine_%"]
    assert read["measured"].tolist()[::2] == [3.0, 0.5]
    assert read["unit"].tolist() == ["none", "B", "s"]
    text = verdict.save(tmp_path / "v_1.tex").read_text()
    assert all(word in text for word in (r"\toprule", r"\begin{table}", r"\label{tab:v-1}"))
    assert r"\caption{1 failed, 1 passed, 1 not measured}" in text
    assert r"fine\_\% & 500 ms & 1 s & pass & fast" in text
    assert "leak & 3 & 0 & FAIL & =3 groups" in text
    assert "gpu & - & " in text


def test_html_is_escaped_and_carries_its_provenance(tmp_path, record):
    nasty = "<script>alert('x')</script> & \"q\""
    page = export(to_frame([record(phase=nasty)]), PROVENANCE, tmp_path / "t.html").read_text()

    class Reader(HTMLParser):
        tags: list[str] = []  # noqa: RUF012
        text: list[str] = []  # noqa: RUF012

        def handle_starttag(self, tag, _attrs):
            self.tags.append(tag)

        def handle_data(self, data):
            self.text.append(data)

    reader = Reader()
    reader.feed(page)
    assert not {"script", "b"} & set(reader.tags)
    assert nasty in reader.text
    assert any(text.startswith("{") and json.loads(text) == PROVENANCE for text in reader.text)


def test_tex_is_escaped_and_carries_its_provenance(tmp_path, record):
    text = export(to_frame([record(phase="a_b & 5% $x^2~{\\}#\n")]), PROVENANCE, tmp_path / "t.tex").read_text()
    assert r"a\_b \& 5\% \$x\textasciicircum 2\textasciitilde \{\textbackslash \}\# " in text
    assert r"\begin{tabular}{llrlrlrlr}" in text
    comments = text.split("% Provenance:\n")[1].splitlines()
    title = export(to_frame([record()]), {}, tmp_path / "t.tex", title="\\input{/etc/passwd}\n^^5c ~ a_b").read_text()
    escaped = r"\textbackslash{}input\{/etc/passwd\} \textasciicircum{}\textasciicircum{}5c \textasciitilde{} a\_b"
    assert rf"\caption{{{escaped}}}" in title
    assert json.loads("\n".join(line.removeprefix("% ") for line in comments)) == PROVENANCE


@pytest.mark.parametrize("suffix", ["md", "tex", "html"])
def test_tables_for_people_leave_out_what_no_record_has(tmp_path, record, suffix):
    def exported(*records):
        return export(to_frame(records), {}, tmp_path / f"t.{suffix}").read_text().replace("text-align", "")

    assert not {name for name in ("text", "ids", "start") if f" {name} " in exported(record(), record(value=None))}
    page = exported(record(), record(ids={"tensor": "embedding"}))
    assert "embedding" in page
    assert "start" not in page
    assert "sha256" in exported(record(text="sha256 ab"))


def test_a_file_is_whole_or_not_there(tmp_path, frame):
    """A folder with the file's name makes the last step fail; no partial file may remain."""
    (tmp_path / "t.json").mkdir()
    with pytest.raises(KitError, match="cannot write"):
        export(frame, {}, tmp_path / "t.json")
    assert [path.name for path in tmp_path.iterdir()] == ["t.json"]


def test_an_old_file_is_replaced(tmp_path, frame):
    (tmp_path / "T.JSON").write_text("old")
    assert len(json.loads(export(frame, {}, tmp_path / "T.JSON").read_text())) == len(frame)


@pytest.mark.parametrize("name", ["t.xlsx", "t", "csv"])
def test_an_unknown_ending_is_bad_input_that_lists_the_known(tmp_path, frame, name):
    with pytest.raises(BadInput, match=r"allowed are \.csv, \.parquet, \.json, \.md, \.tex, \.html"):
        export(frame, {}, tmp_path / name)


def test_a_folder_that_cannot_be_made_is_bad_input(tmp_path, frame):
    assert export(frame, {}, tmp_path / "new" / "folder" / "t.csv").exists()  # a missing folder is made
    with pytest.raises(BadInput, match=r"cannot make the folder .*/t.csv/below: Not a directory"):
        export(frame, {}, tmp_path / "new" / "folder" / "t.csv" / "below" / "t.csv")


@pytest.mark.parametrize("suffix", ["tex", "html"])
def test_long_texts_and_many_rows_are_written_whole(tmp_path, record, suffix):
    rows = [record(text=f"{index} " + "word " * 100 + "end", rank=index) for index in range(200)]
    text = export(to_frame(rows), {}, tmp_path / f"t.{suffix}").read_text()
    assert text.count("word word end") == 200


# -- rows by id --------------------------------------------------------------------------------------------------------


@pytest.fixture
def with_some_ids(record):
    return to_frame(
        [
            record(value=1, ids={"tensor": "a", "step": 1}),
            record(value=2, ids={"step": 2, "tensor": "b"}),
            record(value=3, ids={"step": 2}),
            record(value=4, ids={"tensor": "a", "step": 1, "more": 0}),
            record(value=5),
        ]
    )


def test_ids_in_a_table_are_the_same_text_for_the_same_ids(record):
    one, other = ({"b": 1, "a": "ü"}, {"a": "ü", "b": 1})
    assert to_frame([record(ids=one), record(ids=other), record()])["ids"].tolist() == ['{"a":"ü","b":1}'] * 2 + [""]


def test_a_table_gives_its_rows_back(record):
    given = [record(ids={"groups": (3, 4), "tensor": "a"}, start=1.5, text="two"), record(value=None), record()]
    assert rows_of(to_frame(given)) == given


def test_the_rows_that_have_all_ids_with_a_column_for_each(with_some_ids):
    found = with_ids(with_some_ids, "tensor", "step")
    assert found[["value", "tensor", "step"]].values.tolist() == [[1, "a", 1], [2, "b", 2], [4, "a", 1]]
    assert found["step"].dtype.kind == "i"
    assert list(found.index) == [0, 1, 3]
    assert with_ids(with_some_ids, "step")["step"].tolist() == [1, 2, 2, 1]


def test_no_row_has_them(with_some_ids, record):
    assert with_ids(with_some_ids, "tensor", "group").empty
    assert "group" in with_ids(to_frame([]), "group")
    assert "group" in with_ids(to_frame([record()]), "group")


def test_an_id_with_the_name_of_a_column_is_refused(with_some_ids):
    with pytest.raises(ValueError, match="has a column 'rank' already"):
        with_ids(with_some_ids, "rank")
