from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import textwrap
from contextlib import closing

import pytest

from kit.errors import BadInput, KitError
from kit.results import COLUMNS, RowWriter, Unjudged, to_frame, with_ids
from kit.results.records import REQUIRED, RowsLost
from tests.results.conftest import read_records


def write(path, records):
    with closing(RowWriter(path)) as writer:
        writer.append(records)


@pytest.mark.parametrize(
    "value", [None, 0.1 + 0.2, -0.0, 5e-324, math.inf, -math.inf, math.nan, 1.7976931348623157e308]
)
def test_a_value_survives_the_file_bit_for_bit(tmp_path, record, value):
    write(tmp_path / "records.jsonl", [record(value=value, phase='zurück "\n\u2028" | 計')])
    (back,) = read_records(tmp_path).records
    assert repr(back) == repr(record(value=value, phase='zurück "\n\u2028" | 計'))


def test_text_ids_and_start_survive_the_file(tmp_path, record):
    given = [
        record(text="two\nlines 計", ids={"tensor": "a/b", "step": -(2**63), "groups": (3, 4), "none": ()}, start=0.0),
        record(start=1.5, value=None),
        record(),
    ]
    write(tmp_path / "records.jsonl", given)
    assert read_records(tmp_path).records == given


@pytest.mark.parametrize(
    ("ids", "sentence"),
    [
        ({"step": 1.5}, "step=1.5 is neither text, a whole number nor a list"),
        ({"step": None}, "neither text, a whole number nor a list of whole numbers"),
        ({"step": 2**63}, "does not fit into 64 bits"),
        ({"steps": [1, 2.5]}, "neither text, a whole number nor a list of whole numbers"),
        ({"steps": [1, 2**63]}, "does not fit into 64 bits"),
        ({"rank": 1}, "'rank' is a key of every row"),
    ],
)
def test_ids_that_no_reader_takes_are_refused(record, ids, sentence):
    with pytest.raises(BadInput, match=sentence):
        record(ids=ids).to_line()


@pytest.mark.parametrize(
    ("groups", "wanted"), [((3, 4), (3, 4)), ("3,4", (3, 4)), ("3", (3,)), (3, (3,)), ("", ()), (None, ())]
)
def test_lists_of_older_kits_and_of_other_systems_are_read_alike(record, groups, wanted):
    assert record(ids={} if groups is None else {"groups": groups}).numbers("groups") == wanted


def test_an_id_that_is_missing_or_no_number_is_named(record):
    row = record(metric="sent", ids={"group": 3, "replica": "first", "groups": "3;4"})
    assert (row.number("group"), row.number("sample", 7), row.get("sample")) == (3, 7, None)
    with pytest.raises(Unjudged, match=r"`sent` of group 3, replica first \(row -1, .* has no id `sample`"):
        row["sample"]
    with pytest.raises(Unjudged, match="replica='first'; it must be a whole number"):
        row.number("replica")
    with pytest.raises(Unjudged, match="groups='3;4'; it must be a list of whole numbers"):
        row.numbers("groups")


DEEP = "[" * 100_000
ABSURD = {
    "a value beyond a float": ("0.5", "1e400"),
    "a negative one": ("0.5", "-1e400"),
    "a whole number beyond a float": ("0.5", "1" + "0" * 400),
    "a number of 5,000 digits": ("0.5", "1" * 5000),
    "a value that is true": ("0.5", "true"),
    "a value that is a list": ("0.5", "[1]"),
    "a word that is no number": ("0.5", '"inf"'),
    "brackets, whole": ("0.5", DEEP + "]" * 100_000),
    "brackets": ("0.5", DEEP),
    "a cycle beyond 64 bits": ('"cycle":0', '"cycle":9223372036854775808'),
    "a cycle that is NaN": ('"cycle":0', '"cycle":NaN'),
    "a cycle that is infinite": ('"cycle":0', '"cycle":1e400'),
    "a cycle that is half": ('"cycle":0', '"cycle":0.5'),
    "a rank that is null": ('"rank":0', '"rank":null'),
    "a time that is NaN": ('"time":1760000000.25', '"time":"NaN"'),
    "a time that is null": ('"time":1760000000.25', '"time":null'),
    "ids that are a list": ('"unit":"s"', '"unit":"s","ids":[]'),
    "ids that are null": ('"unit":"s"', '"unit":"s","ids":null'),
    "ids of objects": ('"unit":"s"', '"unit":"s","ids":{"a":{}}'),
    "ids that list texts": ('"unit":"s"', '"unit":"s","ids":{"a":[1,"b"]}'),
    "ids of floats": ('"unit":"s"', '"unit":"s","ids":{"a":1e400}'),
    "ids beyond 64 bits": ('"unit":"s"', '"unit":"s","ids":{"a":-9223372036854775809}'),
    "a text that is a number": ('"unit":"s"', '"unit":"s","text":3'),
    "a start that is a text": ('"unit":"s"', '"unit":"s","start":"early"'),
    "a start that is infinite": ('"unit":"s"', '"unit":"s","start":1e400'),
    "a metric that is a number": ('"seconds"', "5"),
}


@pytest.mark.parametrize("what", ABSURD)
def test_an_absurd_line_is_dropped_and_reported_and_the_others_count(tmp_path, record, what):
    good = record().to_line()
    bad = good.replace(*ABSURD[what])
    assert bad != good
    (tmp_path / "records.jsonl").write_text(good + bad + good)
    loaded = read_records(tmp_path)
    assert loaded.records == [record(), record()]
    assert loaded.notes == ["records.jsonl: 1 unreadable line was dropped (line 2)"]


def test_half_a_character_does_not_cost_the_record(tmp_path, record):
    """A lone surrogate, as in a file name that is not UTF-8: no table could store it."""
    write(tmp_path / "records.jsonl", [record(text="caf\udce9", ids={"file": "\ud83d"}), record(text="\U0001f680")])
    loaded = read_records(tmp_path)
    assert [row.text for row in loaded.records] == ["caf?", "\U0001f680"]
    frame = to_frame(loaded.records)
    assert with_ids(frame, "file")["file"].tolist() == ["?"]


def test_lines_are_strict_json_with_the_keys_that_the_record_has(tmp_path, record):
    write(tmp_path / "records.jsonl", [record(value=math.nan), record(value=-math.inf), record(value=None)])

    def refuse(token):
        raise AssertionError(f"{token} is not JSON")

    rows = [json.loads(line, parse_constant=refuse) for line in (tmp_path / "records.jsonl").read_text().splitlines()]
    assert [row["value"] for row in rows] == ["NaN", "-Infinity", None]
    assert all(tuple(row) == REQUIRED for row in rows)
    whole = record(text="sha256:ab", ids={"tensor": "a/b", "step": 3}, start=0.0)
    assert tuple(json.loads(whole.to_line())) == COLUMNS


def test_what_other_writers_call_nan_is_read_too(tmp_path, record):
    line = record(value=1.0).to_line()
    (tmp_path / "records.jsonl").write_text(line.replace("1.0", "NaN") + line.replace("1.0", "-Infinity"))
    values = [row.value for row in read_records(tmp_path).records]
    assert math.isnan(values[0])
    assert values[1] == -math.inf


@pytest.mark.parametrize("cut", range(1, 40, 3))
def test_a_torn_last_line_is_dropped_and_reported(tmp_path, record, cut):
    path = tmp_path / "records.jsonl"
    write(path, [record(cycle=0), record(cycle=1, phase="é")])
    path.write_bytes(path.read_bytes()[: -1 - cut])
    loaded = read_records(tmp_path)
    assert [row.cycle for row in loaded.records] == [0]
    assert loaded.torn == 1
    assert loaded.notes == ["records.jsonl: 1 unreadable line was dropped (line 2)"]


def test_a_last_line_that_lacks_only_its_newline_counts(tmp_path, record):
    path = tmp_path / "records.jsonl"
    path.write_text(record().to_line().rstrip("\n"))
    assert read_records(tmp_path).torn == 0
    assert len(read_records(tmp_path).records) == 1


def test_torn_lines_in_the_middle_and_foreign_ones_are_counted(tmp_path, record):
    good = record().to_line()
    bad = [good[:30] + "\n", good[:50] + good, "\0\0\0\n", '{"run": 1}\n', "[]\n", good.replace("0.5", '"fast"')]
    (tmp_path / "records.jsonl").write_text(good + "".join(bad) + good)
    loaded = read_records(tmp_path)
    assert len(loaded.records) == 2
    assert loaded.torn == 6
    assert loaded.notes == ["records.jsonl: 6 unreadable lines were dropped (lines 2, 3, 4, 5, 6, ...)"]


def test_a_writer_after_a_killed_one_keeps_its_own_records_whole(tmp_path, record):
    path = tmp_path / "records.jsonl"
    path.write_text(record().to_line()[:20])
    write(path, [record(cycle=7)])
    loaded = read_records(tmp_path)
    assert [row.cycle for row in loaded.records] == [7]
    assert loaded.torn == 1


def test_the_files_of_several_nodes_are_one_run(tmp_path, record):
    write(tmp_path / "records.jsonl", [record(rank=0)])
    write(tmp_path / "records.node1.jsonl", [record(rank=8)])
    assert [row.rank for row in read_records(tmp_path).records] == [0, 8]


def test_two_processes_that_append_at_once_mix_no_lines(tmp_path, record):
    path = tmp_path / "records.jsonl"
    code = textwrap.dedent("""
        import sys
        from contextlib import closing
        from pathlib import Path
        from kit.results import Row, RowWriter
        rank = int(sys.argv[2])
        row = dict(run="r", lab="l", phase="p" * 50, metric="m", value=1.0, unit="1", time=0.0)
        with closing(RowWriter(Path(sys.argv[1]))) as writer:
            for cycle in range(300):
                writer.append([Row(rank=rank, cycle=cycle, **row) for _ in range(5)])
    """)
    procs = [subprocess.Popen([sys.executable, "-c", code, str(path), str(rank)]) for rank in range(2)]
    assert [proc.wait(60) for proc in procs] == [0, 0]
    loaded = read_records(tmp_path)
    assert loaded.torn == 0
    assert sorted({(row.rank, row.cycle) for row in loaded.records}) == [(r, c) for r in range(2) for c in range(300)]


def test_a_full_disk_takes_the_half_written_batch_back(tmp_path, record):
    """A file size limit acts like a full disk: a short write, then an error."""
    path = tmp_path / "records.jsonl"
    code = textwrap.dedent("""
        import resource, sys
        from contextlib import closing
        from pathlib import Path
        from kit.errors import KitError
        from kit.results import Row, RowWriter
        row = Row(run="r", lab="l", cycle=0, phase="p", rank=0, metric="m", value=1.0, unit="1", time=0.0)
        writer = RowWriter(Path(sys.argv[1]))
        writer.append([row] * 3)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
        try:
            writer.append([row] * 100)
        except KitError as error:
            print(error)
    """)
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True)
    assert str(path) in done.stdout
    assert "what was measured before is kept" in done.stdout
    loaded = read_records(tmp_path)
    assert (len(loaded.records), loaded.torn) == (3, 0)


def test_a_torn_tail_that_others_wrote_behind_stays_and_swallows_no_record(tmp_path, record, monkeypatch):
    path = tmp_path / "records.jsonl"
    writer = RowWriter(path)
    real = os.write

    def full(fd, data):
        """Write one and a half records, then fail; meanwhile another rank appends."""
        monkeypatch.setattr(os, "write", refuse)
        done = real(fd, data[: len(data) // 2])
        with path.open("a") as other:
            other.write("\n" + record(rank=1).to_line())
        return done

    def refuse(fd, data):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(RowsLost, match="No space left") as caught:
        writer.append([record(cycle=c) for c in range(3)])
    monkeypatch.setattr(os, "write", real)
    assert caught.value.lost == 2
    writer.append([record(cycle=9)])
    loaded = read_records(tmp_path)
    assert [(row.rank, row.cycle) for row in loaded.records] == [(0, 0), (1, 0), (0, 9)]
    assert loaded.torn == 1


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")  # noqa: PTH110
def test_no_space_left_is_an_error_that_names_the_file(tmp_path, record):
    path = tmp_path / "records.jsonl"
    path.symlink_to("/dev/full")
    with (
        closing(RowWriter(path)) as writer,
        pytest.raises(KitError, match=r"records\.jsonl: No space left on device"),
    ):
        writer.append([record()])


def test_a_folder_that_is_not_there_is_an_error_that_names_the_file(tmp_path):
    with pytest.raises(KitError, match="cannot record into"):
        RowWriter(tmp_path / "gone" / "records.jsonl")


def test_a_killed_process_leaves_all_that_it_appended(tmp_path):
    path = tmp_path / "records.jsonl"
    code = textwrap.dedent("""
        import os, signal, sys
        from contextlib import closing
        from pathlib import Path
        from kit.results import Row, RowWriter
        writer = RowWriter(Path(sys.argv[1]))
        writer.append([Row(run="r", lab="l", cycle=0, phase="p", rank=0, metric="m", value=1, unit="1", time=0)])
        os.kill(os.getpid(), signal.SIGKILL)
    """)
    done = subprocess.run([sys.executable, "-c", code, str(path)])
    assert done.returncode == -signal.SIGKILL
    assert len(read_records(tmp_path).records) == 1


def test_the_frame_has_the_columns_and_their_types_also_when_empty(record):
    full, empty = to_frame([record(value=None), record(value=2)]), to_frame([])
    for frame in (full, empty):
        assert tuple(frame.columns) == COLUMNS
        assert [frame[name].dtype.kind for name in ("cycle", "rank", "value", "time")] == ["i", "i", "f", "f"]
    assert list(full.dtypes) == list(empty.dtypes)
    assert math.isnan(full["value"][0])


def test_importing_the_room_loads_nothing_heavy():
    code = "import sys, kit.results; print([m for m in ('torch', 'numpy', 'pandas', 'matplotlib') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
