"""How every bench runs, tested with fake benches: which rows are on disk, however the bench ended."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kit.bench import session as room
from kit.bench.session import Bench, Book, Part, Row, Session, chosen, conduct, device_for, read_rows, row
from kit.errors import BadInput, KitError
from kit.nccl import SHARED_GPU

MACHINE = {"cpu": {}}
# A bench in its own process: writes two rows, reports it, and waits to be ended.
WAITING = """
import sys, time
from pathlib import Path
from kit.bench.session import Bench, conduct, row
def measured(session):
    session.book.provenance = {"cpu": {"affinity": 2, "cores": 2, "model": ""}, "versions": {}, "gpu": {"gpus": []},
        "git": {"commit": None}, "python": "3", "kit": "0", "time": "now"}
    yield row("first", [1.0])
    yield row("second", [2.0, 4.0])
    print("two rows", flush=True)
    time.sleep(60)
    yield row("third", [3.0])
bench = Bench(lambda device, few: {"slow": measured}, {"few": 1})
raise SystemExit(conduct("made-up", quick=True, out=Path(sys.argv[1]), device="cpu", bench=bench))
"""


def bench(**parts: Any) -> Any:
    def made(work: Any) -> Part:
        def described(session: Session) -> Any:
            session.book.provenance = MACHINE  # otherwise a World would be started to collect it
            return work()

        return described

    given = {name: made(work) for name, work in (parts or {"nothing": list}).items()}
    return Bench(lambda *_, **__: given, {"of": "few"})


@pytest.fixture(autouse=True)
def machine_in_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kit.bench.session.machine", lambda _: "a machine")


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL], ids=["interrupted", "killed"])
def test_rows_of_a_bench_that_is_ended_are_on_disk(how: signal.Signals, tmp_path: Path) -> None:
    """End a real process after two of its three rows."""
    out = tmp_path / "rows.jsonl"
    root = Path(room.__file__).resolve().parents[2]
    process = subprocess.Popen([sys.executable, "-c", WAITING, out], stdout=subprocess.PIPE, text=True, cwd=root)
    assert process.stdout is not None
    assert process.stdout.readline() == "two rows\n"
    process.send_signal(how)
    printed, _ = process.communicate(timeout=60)
    found = read_rows(out)
    assert [(one["what"], one["median"]) for one in found["rows"]] == [("first", 1.0), ("second", 3.0)]
    if how is signal.SIGINT:
        assert process.returncode == 130
        assert found["ended"] == "interrupted"
        assert re.search(r"^first +kit +1 ", printed, re.MULTILINE)
    else:
        assert found["ended"] == ""


def test_a_row_is_on_disk_before_the_next_one_is_measured(tmp_path: Path) -> None:
    out, seen = tmp_path / "rows.jsonl", []

    def measured() -> Iterator[Row]:
        for number in range(3):
            seen.append(len(read_rows(out).get("rows", ())))
            yield row(f"row {number}", [1.0])

    assert conduct("x", out=out, device="cpu", bench=bench(only=measured)) == 0
    assert seen == [0, 1, 2]
    assert read_rows(out)["parts"].keys() == {"only"}


def test_a_later_row_of_the_same_name_takes_its_place(tmp_path: Path) -> None:
    """As after a second trial, which adds samples to the same row."""
    out = tmp_path / "rows.jsonl"
    rows = [row("a", [1.0]), row("b", [1.0]), row("a", [1.0, 3.0]), row("a", [9.0], who="other")]
    conduct("x", out=out, device="cpu", bench=bench(only=lambda: rows))
    reported = [(one["what"], one["who"], one["median"]) for one in read_rows(out)["rows"]]
    assert reported == [("a", "kit", 2.0), ("b", "kit", 1.0), ("a", "other", 9.0)]


def test_a_part_that_breaks_is_a_row_with_the_reason_and_the_others_go_on(tmp_path: Path) -> None:
    def breaks() -> Iterator[Row]:
        yield row("before", [1.0])
        raise KitError("rank 1 died\nand more")

    assert (
        conduct("x", out=tmp_path / "rows.jsonl", device="cpu", bench=bench(a=breaks, b=lambda: [row("after", [1.0])]))
        == 0
    )
    message = read_rows(tmp_path / "rows.jsonl")
    assert [one["what"] for one in message["rows"]] == ["before", "a", "after"]
    assert message["rows"][1]["note"] == "not measured: rank 1 died"
    assert message["rows"][1]["median"] is None


def test_what_is_no_error_of_the_kit_ends_the_bench_and_leaves_its_rows(tmp_path: Path) -> None:
    def wrong() -> Iterator[Row]:
        yield row("before", [1.0])
        raise ZeroDivisionError

    out = tmp_path / "rows.jsonl"
    with pytest.raises(ZeroDivisionError):
        conduct("x", out=out, device="cpu", bench=bench(a=wrong))
    assert (len(read_rows(out)["rows"]), read_rows(out)["ended"]) == (1, "broke")


def test_parts_are_chosen_by_name_or_by_what_they_have_in_common() -> None:
    parts: dict[str, Any] = dict.fromkeys(("steps.a", "steps.b", "stepson", "grid.2"), list)
    assert list(chosen("x", parts, ())) == list(parts)
    assert list(chosen("x", parts, ("steps",))) == ["steps.a", "steps.b"]
    assert list(chosen("x", parts, ("grid.2", "steps.b"))) == ["steps.b", "grid.2"]
    with pytest.raises(BadInput, match=r"bench x has no part 'step'; its parts are: steps\.a, steps\.b, stepson"):
        chosen("x", parts, ("steps", "step"))


def test_sizes_are_those_that_were_asked_for() -> None:
    seen = []
    plain = bench()
    asked = plain._replace(parts=lambda device, *, of="all": seen.append((device, of)) or plain.parts())
    for sizes in ({"quick": True}, {}, {"of": "some"}):
        conduct("x", device="cpu", bench=asked, **sizes)
    assert seen == [("cpu", "few"), ("cpu", "all"), ("cpu", "some")]


def test_where_there_is_a_driver_a_bench_insists_on_the_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver is an empty file. No rank starts: a fake World records its options."""
    monkeypatch.setattr("kit.machine.GPU_DRIVERS", (tmp_path / "driver",))
    assert device_for("auto") == "cpu"
    (tmp_path / "driver").touch()
    assert [device_for(asked) for asked in ("auto", "cpu", "cuda")] == ["cuda", "cpu", "cuda"]
    asked = {}

    class Made:
        numbers = range(2)

        def __init__(self, ranks: int, **options: Any) -> None:
            asked.update(options)

        def status(self) -> list[dict[str, Any]]:
            return [{"device": "cuda:0", "why": "1 CUDA device for 2 ranks"}] * 2

        def call(self, *_: object, **__: object) -> list[Any]:
            return [MACHINE]

    monkeypatch.setattr(room, "World", Made)
    book = Book("x")
    Session(device_for("auto"), tmp_path, book).world(2)
    assert asked["device"] == "cuda"
    assert book.seats == [{"ranks": 2, "devices": ["cuda:0", "cuda:0"], "why": "1 CUDA device for 2 ranks"}]
    book.keep("a", row("time", [1.0], note="so and so"))
    assert book.rows["time", "kit"].note == f"so and so; {SHARED_GPU}"


def test_a_file_that_cannot_be_written_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(BadInput, match="cannot write rows to"):
        conduct("x", out=tmp_path / "file" / "rows.jsonl", device="cpu", bench=bench())


def test_a_torn_last_line_is_passed_over(tmp_path: Path) -> None:
    book = Book("x", tmp_path / "rows.jsonl")
    book.begin()
    book.describe(MACHINE)
    book.keep("a", row("whole", [1.0]))
    with (tmp_path / "rows.jsonl").open("a") as file:
        file.write('{"part": "a", "row": {"wh')
    assert [one["what"] for one in read_rows(tmp_path / "rows.jsonl")["rows"]] == ["whole"]
    assert read_rows(tmp_path / "rows.jsonl")["provenance"] == MACHINE
    assert read_rows(tmp_path / "none") == {}
