"""The draw of mutants by a library: which places it takes, what it leaves out, and the page."""

from __future__ import annotations

import ast
import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.mutants import mechanical, reached
from tests.mutants.catalogue import SETUPS
from tests.mutants.mechanical import (
    EQUIVALENT,
    ROOMS,
    Outcome,
    Room,
    drawn,
    files_of,
    places,
    shared_out,
    unread_lines,
    write,
)

ADD = "ReplaceBinaryOperator_Add_Sub"
SOURCE = """
from __future__ import annotations

def add(first: int | None, second: int = 1) -> int | None:
    total: int | str = first + second
    return total
"""


def outcome(room: str, state: str, number: int) -> Outcome:
    return Outcome(
        id=f"{room}-{number}",
        room=room,
        file="kit/a.py",
        unit="f",
        line=number,
        operator="AddNot",
        change="a -> b",
        state=state,
    )


def test_annotations_are_no_places() -> None:
    unread = unread_lines(SOURCE)
    signs = [node for node in ast.walk(ast.parse(SOURCE)) if isinstance(node, ast.BinOp)]
    outside = [
        ast.unparse(node)
        for node in signs
        if not any(start <= (node.lineno, node.col_offset) < end for start, end in unread)
    ]
    assert outside == ["first + second"]


def test_every_room_has_files_and_a_share_by_its_statements() -> None:
    assert all(files_of(room) for room in ROOMS)
    shares = shared_out(300)
    assert set(shares) == {"offload", "split", "sync", "stream", "share"}
    assert abs(sum(shares.values()) - 300) <= len(ROOMS)
    assert shares["sync"] == max(shares.values())


def test_at_most_one_in_ten_is_called_equivalent() -> None:
    assert len(EQUIVALENT) <= mechanical.COUNT / 10
    assert all(len(why) > 20 for why in EQUIVALENT.values()), "an argument for each"


def test_rooms_with_setups_run_all_of_them_on_what_no_run_before_has_seen() -> None:
    runs = {room.name: room.runs for room in ROOMS}
    setups = Counter(setup.lab for setup in SETUPS.values())
    assert all(runs[lab][:number] == mechanical.runs_of(lab) for lab, number in setups.items())
    assert runs["split"][0].startswith("run split --set ranks=2 --set chunks=[1,2] --set microbatches=4")
    for setting in ("transport=broadcast", "arena=cache"):
        assert any(run.endswith(f"--set {setting}") for run in runs["sync"])


def test_the_page_counts_what_the_lab_sees_alone_and_what_the_tests_add(
    tmp_path: Path,
) -> None:
    page = tmp_path / "mutants.md"
    page.write_text("# Mutants\n\nwords\n\n## By check\n\nrows\n")
    states = ("check", "broke", "tests", "survived", "untested", "mended")
    outcomes = [outcome("share", state, number) for number, state in enumerate(states)]
    for each, runs in zip(outcomes, (0, 0, 0, 1, 0, 0), strict=True):  # unreached is one of what nothing saw
        each.runs = runs
    for _ in range(2):  # the second time in place of the first
        write(page, outcomes, {"share": 9})
    text = page.read_text()
    assert text.startswith("# Mutants\n\nwords\n\n## Drawn by a library\n")
    assert text.endswith("\n## By check\n\nrows\n")
    row = "| share | 9 | 6 | 1 | 1 | 2 (33%; 10% to 70%) | 3 (50%; 19% to 81%) | 4 (67%; 30% to 90%) | 1 | 1 | 0 | 1 |"
    assert text.count(row) == 1
    assert "share-3" in text
    assert "share-0" not in text


def test_the_commit_chooses_the_places_and_each_place_gets_one_mutant() -> None:
    pytest.importorskip("cosmic_ray", reason="cosmic-ray is not installed: pip install -e .[mutants]")
    room = Room("small", ("kit/share/state.py",), (), ())
    chosen = drawn(room, 5, "a commit")
    assert chosen == drawn(room, 5, "a commit")
    assert chosen != drawn(room, 5, "another commit")
    where = {place: (place.file, place.unit, place.source, *position) for position, place in places(room)}
    assert len({where[place] for place in chosen}) == 5
    for place in chosen:
        source = (mechanical.ROOT / place.file).read_text()
        changed = mechanical.mutate(source, mechanical.operators()[place.operator], place.occurrence)
        lines = list(zip(source.splitlines(), changed.splitlines(), strict=True))
        assert [number for number, (old, new) in enumerate(lines, 1) if old != new] == [place.line]


def test_a_mutant_keeps_its_name_until_its_function_changes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("cosmic_ray", reason="cosmic-ray is not installed: pip install -e .[mutants]")
    monkeypatch.setattr(mechanical, "ROOT", tmp_path)

    def names(source: str) -> dict[str, str]:
        (tmp_path / "a.py").write_text(source)
        found = {place.unit: place.id for _, place in places(Room("small", ("a.py",), (), ())) if place.operator == ADD}
        assert set(found) == {"first", "second"}
        return found

    functions = "def first(a):\n    return a + 1\n\n\ndef second(a):\n    return a + 2\n"
    before = names(functions)
    after = names("import os\n\n\n" + functions.replace("a + 1", "a + 3"))
    assert before["first"] != after["first"]
    assert before["second"] == after["second"]


def test_a_beginning_of_the_draw_has_each_room_in_proportion() -> None:
    queues = {
        name: [mechanical.Place(name, "a.py", line, "AddNot", 0) for line in range(size)]
        for name, size in (("small", 10), ("large", 30))
    }
    beginning = mechanical.in_turns(queues)[:20]
    assert Counter(place.room for place in beginning) == {"small": 5, "large": 15}


def test_what_nothing_saw_runs_again_once_its_lab_has_changed() -> None:
    now = mechanical.judges(ROOMS[0])
    by_state = {
        state: outcome(ROOMS[0].name, state, 0) for state in ("check", "tests", "mended", "survived", "untested")
    }
    assert {state for state, each in by_state.items() if each.holds} == {"check", "tests", "mended"}
    for each in by_state.values():
        each.judges = now
    assert all(each.holds for each in by_state.values())


TWO_WAYS = """
from __future__ import annotations


def sign(number):
    if number < 0:
        sign = -1
    elif number > 0:
        sign = 1
    else:
        sign = (
            0
        )
    return sign
"""


def test_statements_that_each_turn_reaches(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    turn = reached.Turn(tmp_path)
    monkeypatch.setattr(reached, "FOLDER", tmp_path)
    monkeypatch.setattr(reached, "TURN", reached.Turn(tmp_path))  # what another process has
    names: dict[str, Any] = {}
    exec(reached.instrumented(TWO_WAYS, "a.py"), names)
    found = []
    for number in (2, 0, 0):
        names["sign"](1)  # between two turns
        begun = turn.begin()
        names["sign"](number)
        found.append({line for _, line in turn.noted(begun)})
        turn.now = 0
    assert found == [{6, 8, 9, 14}, {6, 8, 11, 14}, {6, 8, 11, 14}]
    assert [reached.statement_of(TWO_WAYS, line) for line in (5, 6, 7, 12, 14)] == [0, 6, 7, 11, 14]


CONSTANTS = """
LIMIT = 3
OTHER = 4


class Waits:
    limit: int = LIMIT

    def more(self, times=2):
        if times > self.limit:
            return 0
        return times


def at_most(number):
    return min(number, LIMIT)
"""


def test_a_constant_is_reached_where_it_is_read_and_a_header_by_its_function(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(mechanical, "ROOT", tmp_path)
    (tmp_path / "a.py").write_text(CONSTANTS)
    room = Room("small", ("a.py",), (), ())

    def lines(number: int) -> set[int]:
        found = mechanical.statements_at(room, mechanical.Place("small", "a.py", number, "AddNot", 0))
        assert {file for file, _ in found} <= {"a.py"}
        return {line for _, line in found}

    assert lines(2) == {16}
    assert lines(3) == set()
    assert lines(7) == {10}
    assert lines(9) == {10, 11, 12}
    assert lines(11) == {11}


def test_two_runs_and_those_that_reach_more_of_the_function(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(mechanical, "ROOT", tmp_path)
    (tmp_path / "a.py").write_text(TWO_WAYS)
    reaches = {
        "one": {6, 8, 14},
        "no": {8},
        "same": {6, 8, 14},
        "third": {6, 8, 14},
        "more": {6, 7, 14},
        "no more": {6, 7},
    }
    ran: list[str] = []

    class Copy:
        def run(self, arguments: str, mode: str, limit_s: float) -> tuple[str, list[str]]:
            ran.append(arguments)
            return "survived", []

    class Map:
        def of_run(self, room: Room, arguments: str) -> mechanical.Reach:
            return mechanical.Reach({("a.py", line) for line in reaches[arguments]}, 1.0)

    room = Room("small", ("a.py",), tuple(reaches), ())
    copy: Any = Copy()
    known: Any = Map()
    place = mechanical.Place("small", "a.py", 14, "AddNot", 0)
    monkeypatch.setattr(mechanical, "key_of_lab", "key of {}".format)
    through: list[str] = []
    assert mechanical.by_lab(copy, known, room, place, through, runs=1) == ("untested", [])
    assert ran == ["one"]
    assert mechanical.by_lab(copy, known, room, place, through) == ("untested", [])
    assert ran == ["one", "more"], "a run is not had twice"
    assert through == ["key of one", "key of more"]
    assert mechanical.by_lab(copy, known, room, place, ["key of more"]) == ("untested", [])
    assert ran == ["one", "more", "one"], "one that was never had is not skipped"
    reaches["more"] = {6, 8, 14}
    ran.clear()
    assert mechanical.by_lab(copy, known, room, place, []) == ("untested", [])
    assert ran == ["one", "same"]


@pytest.mark.parametrize("late_without_it", [False, True])
def test_what_a_busy_machine_may_say_runs_again_and_then_without_the_mutant(
    late_without_it: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(mechanical, "ROOT", tmp_path)
    monkeypatch.setattr(mechanical, "key_of_lab", str)
    (tmp_path / "a.py").write_text(TWO_WAYS)
    did: list[str] = []

    class Copy:
        mutated = True

        def run(self, arguments: str, mode: str, limit_s: float) -> tuple[str, list[str]]:
            did.append("mutant" if self.mutated else "control")
            return ("broke", ["exit 3: Timeout"]) if self.mutated or late_without_it else ("survived", [])

        def restore(self, place: mechanical.Place) -> None:
            self.mutated = False

        def change(self, place: mechanical.Place) -> None:
            self.mutated = True

    class Map:
        def of_run(self, room: Room, arguments: str) -> mechanical.Reach:
            return mechanical.Reach({("a.py", 14)}, 1.0)

    copy: Any = Copy()
    known: Any = Map()
    place = mechanical.Place("small", "a.py", 14, "AddNot", 0)
    room = Room("small", ("a.py",), ("one",), ())
    if late_without_it:
        with pytest.raises(mechanical.BusyMachineError, match="Timeout"):
            mechanical.by_lab(copy, known, room, place, [])
    else:
        assert mechanical.by_lab(copy, known, room, place, []) == ("broke", ["exit 3: Timeout"])
    assert did == ["mutant", "mutant", "control"]
    assert copy.mutated


def test_a_test_that_takes_too_long_does_not_end_the_list(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = {"a.py::first": 100.0, "a.py::long": 200.0, "b.py::second": 350.0, "c.py::last": 60.0}
    names = {"b.py::short": 120.0, **seconds}
    asked: list[str] = []

    class Copy:
        def tests(self, names: list[str], limit_s: float) -> tuple[str, list[str]]:
            asked.extend(names)
            return "survived", []

    class Map:
        def of_tests(self, folder: str) -> dict[str, mechanical.Reach]:
            return {name: mechanical.Reach({("a.py", 1)}, takes) for name, takes in names.items()}

    copy: Any = Copy()
    known: Any = Map()
    assert mechanical.TESTS_S == 240.0
    mechanical.by_tests(copy, known, Room("small", (), (), ("tests",)), {("a.py", 1)})
    assert asked == ["c.py::last", "a.py::first"]
    names["b.py::short"] = 80.0
    asked.clear()
    mechanical.by_tests(copy, known, Room("small", (), (), ("tests",)), {("a.py", 1)})
    assert asked == ["c.py::last", "a.py::first", "b.py::short"], "the one between them takes too long"


def test_each_pass_takes_what_waits_for_it() -> None:
    now = mechanical.judges(ROOMS[0])

    def left(state: str, judges: str) -> list[str]:
        each = outcome(ROOMS[0].name, state, 0)
        each.judges = judges
        return [ask for ask in (mechanical.FIRST, mechanical.LAB, mechanical.TESTS) if mechanical.is_left(each, ask)]

    assert [ask for ask in ("first", "lab", "tests") if mechanical.is_left(None, ask)] == ["first"]
    assert {state: left(state, now) for state in ("begun", "untested", "survived", "check", "tests")} == {
        "begun": ["lab", "tests"],
        "untested": ["tests"],
        "survived": [],
        "check": [],
        "tests": [],
    }
    assert {state: left(state, "before") for state in ("begun", "untested", "survived", "check")} == {
        "begun": ["lab", "tests"],
        "untested": ["lab", "tests"],
        "survived": ["lab", "tests"],
        "check": [],
    }


@pytest.mark.parametrize(("seen", "state"), [(False, "begun"), (True, "tests")])
def test_what_tests_let_through_still_waits_for_the_runs_of_its_lab(
    seen: bool, state: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(mechanical, "ROOT", tmp_path)
    (tmp_path / "a.py").write_text(TWO_WAYS)

    class Copy:
        def change(self, place: mechanical.Place) -> str:
            return "a change"

        def restore(self, place: mechanical.Place) -> None: ...

        def tests(self, names: list[str], limit_s: float) -> tuple[str, list[str]]:
            return ("tests", names) if seen else ("survived", [])

    class Map:
        def of_tests(self, folder: str) -> dict[str, mechanical.Reach]:
            return {"a.py::test": mechanical.Reach({("a.py", 14)}, 1.0)}

    copy: Any = Copy()
    known: Any = Map()
    room, place = (
        ROOMS[0]._replace(files=(), tests=("tests",)),
        mechanical.Place(ROOMS[0].name, "a.py", 14, "AddNot", 0),
    )
    monkeypatch.setattr(mechanical, "judges", lambda room: "today")
    before = outcome(room.name, "begun", 0)
    assert mechanical.judged(copy, known, room, place, before, ask="tests").state == state


@pytest.mark.parametrize(("lab_sees", "state"), [(False, "tests"), (True, "check")])
def test_what_tests_saw_stays_seen_where_its_lab_is_asked_again(
    lab_sees: bool, state: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(mechanical, "ROOT", tmp_path)
    monkeypatch.setattr(mechanical, "key_of_lab", str)
    monkeypatch.setattr(mechanical, "judges", lambda room: "today")
    (tmp_path / "a.py").write_text(TWO_WAYS)
    room = Room(ROOMS[0].name, ("a.py",), ("one",), ())
    place = mechanical.Place(room.name, "a.py", 14, "AddNot", 0)
    results = tmp_path / "drawn.jsonl"
    before = outcome(room.name, "tests", 0)
    before.id = place.id
    mechanical.note(results, before)

    class Copy:
        def change(self, place: mechanical.Place) -> str:
            return "a change"

        def restore(self, place: mechanical.Place) -> None: ...

        def run(self, arguments: str, mode: str, limit_s: float) -> tuple[str, list[str]]:
            return ("check", ["a_check"]) if lab_sees else ("survived", [])

    class Map:
        def of_run(self, room: Room, arguments: str) -> mechanical.Reach:
            return mechanical.Reach({("a.py", 14)}, 1.0)

    known: Any = Map()
    copies: list[Any] = [Copy()]
    rooms = {room.name: room}
    mechanical.run_pass(rooms, [place], results, known, copies, ask="lab", end=math.inf)
    assert len(results.read_text().splitlines()) == 1, "nothing asked for it"
    mechanical.run_pass(rooms, [place], results, known, copies, ask="lab", again=[place.id], end=math.inf)
    assert [each.state for each in mechanical.read(results, [place])] == [state]


def test_other_runs_of_a_room_are_other_judges() -> None:
    room = ROOMS[0]
    assert mechanical.judges(room._replace(runs=room.runs[1:])) != mechanical.judges(room)


def test_counted_runs_are_written_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(TWO_WAYS)
    monkeypatch.setattr(mechanical, "ROOT", tmp_path)
    monkeypatch.setattr(mechanical, "key_of_run", lambda room, arguments: arguments)
    monkeypatch.setattr(mechanical, "Known", lambda: {"one": ["a.py:14", 1.0]})
    place = mechanical.Place("small", "a.py", 14, "AddNot", 0)
    results = tmp_path / "drawn.jsonl"
    each = outcome("small", "begun", 0)
    each.id = place.id
    mechanical.note(results, each)
    for _ in range(2):
        mechanical.count_runs([Room("small", ("a.py",), ("one",), ())], [place], results)
    assert [kept.runs for kept in map(read_line, results.read_text().splitlines())] == [-1, 1]


def read_line(line: str) -> Outcome:
    return Outcome(**json.loads(line))


def test_reasons_are_of_mutants_that_a_lab_alone_does_not_see() -> None:
    newest = {each.id: each.state for each in map(read_line, mechanical.RESULTS.read_text().splitlines())}
    named = {*EQUIVALENT, *mechanical.WHY}
    assert not {name for name in named if newest.get(name, "check") in mechanical.SEEN_BY_LAB}
