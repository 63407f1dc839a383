"""The page of ledgers has every row that a judge reads, and a ledger written from the page alone is judged right."""

from __future__ import annotations

import ast
import inspect
import json
import random
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from kit.labs.discover import find
from kit.labs.share.drive import simulate_pipelines
from kit.labs.share.ledgers import settled
from kit.labs.share.scenarios import SCENARIOS
from kit.labs.share.simulated import AS_CONFIGURED, SCENES
from kit.labs.stream.worlds import StreamWorlds
from kit.loop.messages import Memory
from kit.results import Run
from kit.results.ledger import Ledger
from kit.results.records import Row, Unjudged
from kit.results.rules import NotMeasured, Violations
from kit.share import judge as share
from kit.share.judge.books import DeskLedger
from kit.stream import judge as stream
from kit.stream.core import resume_from
from kit.stream.judge.history import ENDS, LoopLedger
from tests.labs.share.conftest import share as share_of

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "ledger.md").read_text()
JUDGES = tuple(
    f"{room}/judge/{path.stem}" for room in ("stream", "share") for path in (ROOT / "kit" / room / "judge").glob("*.py")
)
COMPANIONS = ({"expand", "expanded", "joined", "left", "shrink", "shrunk"},)  # lines of the page that belong together
# Lines of a desk's ledger that nothing else shows to be left out, by one of their events, as the page says.
NEVER_MISSED = {
    "died": "where nobody writes that ranks died, the desk gives away what they held, and their pipelines end for no reason",
    "error": "where nobody writes what failed, a replica wakes for ever, and a request that was refused waits for ever",
    "resize": "where nobody writes which replicas may not wake, they sleep for no reason",
}


def texts(*nodes: ast.AST) -> Iterator[str]:
    for node in nodes:
        for part in ast.walk(node):
            if isinstance(part, ast.Constant) and isinstance(part.value, str) and re.fullmatch("[a-z]\\w+", part.value):
                yield part.value


def is_event(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == "event"


def events_read(source: str, *, of_desk: bool) -> Iterator[str]:
    """Names of events in a judge's source: compared with `row.event`, or looked up in a ledger. In the desk's judge all arguments of
    `need` are events, in the loop's judge only the first."""
    tree = ast.parse(source)
    tables = {
        ast.unparse(node.targets[0]): node.value.keys if isinstance(node.value, ast.Dict) else [node.value]
        for node in tree.body
        if isinstance(node, ast.Assign)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare) and is_event(node.left):
            yield from texts(*(other for other in node.comparators if not isinstance(other, (ast.Call, ast.Subscript))))
            yield from texts(
                *(part for other in node.comparators for part in tables.get(ast.unparse(other), ()) if part)
            )
        elif isinstance(node, ast.Match) and is_event(node.subject):
            yield from texts(*(part for case in node.cases for part in ast.walk(case.pattern)))
        elif isinstance(node, ast.Subscript) and getattr(node.value, "attr", "") == "by_event":
            yield from texts(node.slice)
        elif isinstance(node, ast.Call) and any(map(is_event, node.args)):  # looked up in a table of events
            yield from texts(*filter(None, tables.get(ast.unparse(node.func).removesuffix(".get"), ())))
        elif isinstance(node, ast.Call):
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if name == "of" or (name == "need" and of_desk):
                yield from texts(*node.args)
            elif name == "need":
                yield from texts(*node.args[:1])


def lines_of(section: str) -> list[set[str]]:
    """The events of each line of a section's table."""
    table = PAGE.partition(f"## {section}")[2].partition("\n## ")[0].splitlines()
    return [set(re.findall(r"`(\w+)`", line.split("|")[1])) for line in table if line.startswith("| `")]


def failed(rules: Sequence[Callable[..., Violations]], ledger: Ledger) -> dict[str, str]:
    """The rules that do not pass. A rule that lacks an event is no failure."""
    wrong = {}
    for rule in rules:
        try:
            measured = settled(rule, ledger)
        except Unjudged as error:
            wrong[rule.__name__] = str(error)
        except NotMeasured:
            continue
        else:
            if measured.value:
                wrong[rule.__name__] = measured.why
    return wrong


def without(rows: Sequence[dict[str, Any]], events: set[str]) -> list[dict[str, Any]]:
    return [row for row in rows if row["event"] not in events]


def test_every_row_that_a_judge_reads_is_on_the_page() -> None:
    read = set[str]()
    for name in JUDGES:
        read |= set(events_read((ROOT / "kit" / f"{name}.py").read_text(), of_desk=name.startswith("share")))
    assert len(read) > 50
    notes = set(re.findall(r"`(\w+)`", PAGE.partition("## Notes and what backs them")[2].partition("\n## ")[0]))
    assert sorted(read - notes.union(*lines_of("Events"), *lines_of("The ledger of a desk"))) == []


def ids_read(source: str) -> Iterator[str]:
    """Names of ids in a judge's source: `row["x"]`, `row.get("x")`, `row.number("x")`, `need(event, "x")`, or compared with the ids."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Subscript) and getattr(node.value, "attr", "") not in ("by_event", "limits"):
            yield from texts(*([node.slice] if isinstance(node.slice, ast.Constant) else []))
        elif isinstance(node, ast.Compare) and any(getattr(other, "attr", "") == "ids" for other in node.comparators):
            yield from texts(*([node.left] if isinstance(node.left, ast.Constant) else []))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            reads = {"get": node.args[:1], "number": node.args[:1], "numbers": node.args[:1], "need": node.args[1:]}
            of_ids = not isinstance(node.func.value, ast.Name) or not node.func.value.id.isupper()
            yield from texts(
                *(one for one in reads.get(node.func.attr, ()) if of_ids and isinstance(one, ast.Constant))
            )


def test_every_id_that_a_judge_reads_is_on_the_page() -> None:
    read = set[str]()
    for name in (*JUDGES, "results/progress"):
        read |= set(ids_read((ROOT / "kit" / f"{name}.py").read_text()))
    assert len(read) > 40
    tables = PAGE.partition("## Events and their ids")[2].partition("\n## What is judged")[0]
    tables += PAGE.partition("## The ledger of a desk")[2].partition("\n## ")[0]
    tables += PAGE.partition("## Notes and what backs them")[2].partition("\n## ")[0]
    assert sorted(read - {*re.findall(r"\w+", tables)}) == []


def test_every_call_that_a_judge_finds_in_an_error_is_on_the_page() -> None:
    read = set[str]()
    for name in JUDGES:
        for node in ast.walk(ast.parse((ROOT / "kit" / f"{name}.py").read_text())):
            if isinstance(node, ast.Compare) and "get('of')" in ast.unparse(node.left):
                read |= set(texts(*node.comparators))
    assert {"finish", "generate", "shrink"} <= read
    lines = [line for line in PAGE.splitlines() if line.startswith(("| `error`", "| `expand`", "| `left`"))]
    assert sorted(read - {*re.findall(r"\w+", " ".join(lines))}) == []


def test_every_setting_that_a_judge_reads_is_on_the_page() -> None:
    sources = [(ROOT / "kit" / f"{name}.py").read_text() for name in JUDGES]
    reads = r"\.(?:limit|setting|size|stated|limits\.get)\(\"(\w+)\""
    read = {name for source in sources for name in re.findall(reads, source)}
    assert len(read) > 12
    lines = [line for line in PAGE.splitlines() if line.startswith(("| `capacity`", "| `limits`", "| `chosen`"))]
    assert sorted(read - {"pipeline", *re.findall(r"\w+", " ".join(lines))}) == []  # `pipeline` is an id of every row


def test_a_loops_ledger_may_leave_out_any_event(tmp_path: Path) -> None:
    subprocess.run([sys.executable, ROOT / "docs" / "examples" / "ledger.py", tmp_path / "run"], check=True, cwd=ROOT)
    recorded = [json.loads(line) for line in (tmp_path / "run" / "records.jsonl").read_text().splitlines()]
    rows = [{"event": row["metric"], "time": row["time"], **row["ids"]} for row in recorded if row["value"] is None]
    for events in [set[str](), *({row["event"]} for row in rows)]:
        assert failed(stream.RULES, LoopLedger(without(rows, events))) == {}, f"without {events}"


# Worlds of the lab `stream` whose loops together have every event of the page but `chosen` (own samplers) and `resumed`.
WORLDS = (2, 42, 116, 158, 185, 204, 227, 236, 254, 323, 359)
GROUPS_END = "ends of groups"
# What cannot be told from a wrong loop where it is left out, with the checks that fail then. The page says so.
BELONG_TO_OTHERS = {
    GROUPS_END: {"abort_on_failure"},  # a group of an aborted step is lost, or its end is not written
    "abort": {"abort_on_failure", "one_step_per_batch", "ends_cleanly", "eviction_justified"},  # the step goes on
    "acquire": {"permits_return"},  # granted without a request
    "release": {"permits_return"},  # devices never returned
    "ended": {"ends_cleanly"},  # the data ended and the loop hangs
    "failed": {"eviction_justified", "ends_cleanly", "no_needless_waste"},  # given up or sent again without a reason
    "filtered": {"eviction_justified"},  # dropped without a reason
    "died": {"metrics_true", "no_needless_waste"},  # the replica is idle; its requests are sent again without a reason
    "left": {"metrics_true", "no_needless_waste"},
}


def ids_of_the_page() -> dict[str, tuple[set[str], set[str]]]:
    """For each event of a loop, its ids and those in brackets."""
    table = PAGE.partition("## Events and their ids")[2].partition("\n## ")[0].splitlines()
    ids = defaultdict[str, tuple[set[str], set[str]]](lambda: (set(), set()))
    for events, named in (line.split("|")[1:3] for line in table if line.startswith("| `")):
        in_brackets = " ".join(re.findall(r"\[(.*?)\]", named))
        for event in re.findall(r"`(\w+)`", events):
            ids[event][0].update(re.findall(r"\w+", named))
            ids[event][1].update(re.findall(r"\w+", in_brackets))
    ids["metrics"][1].update(f"total_{end}" for end in ENDS)
    ids["metrics"][0].update(ids["metrics"][1])
    ids["logprobs"] = ({"step", "update"}, {"update"})  # in the page's table of notes
    return dict(ids)


def as_another_system(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """A loop's ledger as another system writes it from the page."""
    page = ids_of_the_page()
    return [
        {"event": row.event, "time": row.time, **{name: row[name] for name in row.ids if name in page[row.event][0]}}
        for row in rows
        if row.event in page
    ]


def leave_out(rows: Sequence[dict[str, Any]]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """The ledger without each of its events, the ends of groups taken together, and without each id in brackets."""
    page, names = ids_of_the_page(), {row["event"] for row in rows}

    def is_end(row: dict[str, Any]) -> bool:
        return row["event"] in ENDS and "sample" not in row

    yield "nothing", [*rows]
    yield GROUPS_END, [row for row in rows if not is_end(row)]
    for event in sorted(names):
        yield event, [row for row in rows if row["event"] != event or is_end(row)]
        # All rows of a step with several updates have `update`, and an error its reason.
        for name in sorted(page[event][1] - {"update"} - ({"error"} if event == "ended" else set())):
            yield (
                f"{event}.{name}",
                [{key: row[key] for key in row if key != name or row["event"] != event} for row in rows],
            )


def test_a_loops_ledger_may_leave_out_any_event_and_any_id_in_brackets() -> None:
    worlds, seen = StreamWorlds(), set[str]()
    for seed in WORLDS:
        recorded = Memory()
        worlds.run(worlds.draw(random.Random(seed)), recorded)
        rows = as_another_system([row for row in recorded if row.phase != "resume"])
        seen |= {row["event"] for row in rows}
        for what, left in leave_out(rows):
            wrong = failed(stream.RULES, LoopLedger(left))
            known = BELONG_TO_OTHERS.get(what, set())
            assert {rule: why for rule, why in wrong.items() if rule not in known} == {}, f"world {seed} without {what}"
    assert ids_of_the_page().keys() - seen == {"chosen", "resumed"}


def test_each_pipeline_of_a_folder_is_judged(tmp_path: Path) -> None:
    subprocess.run([sys.executable, ROOT / "docs" / "examples" / "ledger.py", tmp_path / "run"], check=True, cwd=ROOT)
    records = tmp_path / "run" / "records.jsonl"
    rows = [json.loads(line) for line in records.read_text().splitlines()]
    of_both = [{**row, "ids": {**row["ids"], "pipeline": name}} for row in rows for name in "ab"]

    def judged(written: Sequence[dict[str, Any]], *, passed: bool = False) -> dict[str, str]:
        records.write_text("".join(f"{json.dumps(row)}\n" for row in written))
        verdict = Run(tmp_path / "run", rules=lambda _: find("stream").all_rules()).verdict()
        return {answer.check: answer.why for answer in verdict if answer.passed is passed}

    assert judged(of_both) == {}
    lost = next(row for row in of_both if row["metric"] == "published" and row["ids"]["pipeline"] == "a")
    assert "stream of a" in judged([row for row in of_both if row is not lost])["publish_before_use"]
    common = [row for row in rows if row["metric"] == "capacity"]  # it names no pipeline, so it holds for both
    with_common = [*common, *(row for row in of_both if row["metric"] != "capacity")]
    assert judged(with_common) == {}
    assert judged(with_common, passed=True).keys() == judged(of_both, passed=True).keys()


def of_another_system(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """The rows of a run of the kit as the page tells another system to write them: each once, with the pipeline that it is about."""
    own = {"core", "to", "who", "pipeline"}
    return [
        {
            "event": row.event,
            "time": row.time,
            **({"core": row["core"]} if row.event == "begins" else {"pipeline": row.who}),
            **{name: value for name, value in row.ids.items() if name not in own},
        }
        for row in DeskLedger(rows).rows
    ]


def may_be_left_out(rows: Sequence[dict[str, Any]]) -> list[set[str]]:
    """The lines of the page that a ledger has, and which it may leave out; and no line."""
    written = {row["event"] for row in rows}
    lines = [set[str](), *lines_of("The ledger of a desk"), *COMPANIONS]
    parts = [line for line in lines if not any(line < together for together in COMPANIONS)]
    return [line for line in parts if not line or (line & written and not line & {*NEVER_MISSED})]


def test_a_desks_ledger_may_leave_out_any_line() -> None:
    rows: list[dict[str, Any]] = []

    class Recorder:
        def event(self, name: str, **ids: Any) -> None:
            rows.append({"event": name, "time": float(len(rows)), **ids})

    (snippet,) = re.findall(
        r"```python\n(.*?)```", PAGE.partition("## The ledger of a desk")[2].partition("\n## ")[0], re.DOTALL
    )
    exec(snippet, {"rec": Recorder()})
    for events in may_be_left_out(rows):
        assert failed(share.RULES, DeskLedger(without(rows, events))) == {}, f"without {events}"
    wrong = [row for row in rows if row["event"] != "released"]
    assert [*failed(share.RULES, DeskLedger(wrong))] == ["planned_release_once"]


@pytest.mark.parametrize("name", SCENARIOS)
def test_the_ledger_of_a_scripted_desk_may_leave_out_any_line(name: str) -> None:
    rows = of_another_system(SCENARIOS[name].run().rows)
    for events in may_be_left_out(rows):
        assert failed(share.RULES, DeskLedger(without(rows, events))) == {}, f"without {events}"


@pytest.mark.parametrize("scene", [AS_CONFIGURED, *SCENES], ids=lambda scene: scene.name)
def test_the_ledger_of_a_simulated_desk_may_leave_out_any_line(scene: Any) -> None:
    rows = of_another_system(simulate_pipelines(share_of(simulated=True, steps=2, groups=2), scene).rows)
    assert len(may_be_left_out(rows)) > 10
    for events in may_be_left_out(rows):
        assert failed(share.RULES, DeskLedger(without(rows, events))) == {}, f"without {events}"


@pytest.mark.parametrize(
    ("line", "checks"),
    [
        ("limits", {"devices_conserved", "plan_valid"}),
        ("acquire", {"devices_conserved", "no_starvation", "plan_as_specified"}),
        ("release", {"one_owner", "devices_conserved", "no_request_lost", "plan_valid"}),
        ("expand", {"devices_conserved", "plan_valid", "plan_as_specified"}),
        ("progress", {"plan_as_specified", "progress_ended"}),
        ("unregister", {"plan_as_specified"}),
    ],
)
def test_a_desk_of_the_lab_that_never_does_what_a_line_says_is_wrong(line: str, checks: set[str]) -> None:
    """The kit's runner writes all that happens, so nothing is left out."""
    events = max((events for events in [*lines_of("The ledger of a desk"), *COMPANIONS] if line in events), key=len)
    rows = [row for row in SCENARIOS["crowd"].run().rows if row.event not in events]
    assert failed(share.RULES, DeskLedger(rows)).keys() >= checks


def test_the_page_of_own_code_has_what_a_resume_reads_of_a_state() -> None:
    page = (ROOT / "docs" / "own-code.md").read_text().partition("### Your own controller")[2].partition("\n## ")[0]
    read = set(re.findall(r"state\.(\w+)", inspect.getsource(resume_from)))
    assert len(read) > 5
    assert (
        sorted(
            name
            for name in read
            if f"`{name}`" not in page and f"`{name}[" not in page and f"`state.{name}`" not in page
        )
        == []
    )
