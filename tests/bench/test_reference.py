"""`kit reference`: a few small parts in real processes; an interrupted reference resumes where it stopped."""

from __future__ import annotations

import inspect
import itertools
import json
import pkgutil
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

import pytest

from kit.bench import BENCHES, reference
from kit.bench.reference import (
    ASSUMED_BOX,
    GPU_MINUTES,
    LEAST_S,
    LEFT_OUT,
    Part,
    able,
    bench,
    find_times,
    is_settled,
    lab,
    make,
    on_cpu,
    on_gpus,
    pack_into,
    perform,
    plan,
    plan_text,
    scale,
    settled,
    short_of,
    sizes_here,
    write_page,
)
from kit.bench.session import Book, chosen, row
from kit.cli import benches
from kit.errors import BadInput
from kit.labs.discover import discover, find, validate
from kit.preflight import run as preflight
from kit.results.records import read_json, write_json

SLOW_BOX = 60.0  # limits that hold on a busy machine, for parts that really run
SMALL = (lab("smoke", 3, cycles=2), lab("smoke", 3, "refused", cycles=0))
RECORDED = Path(__file__).resolve().parents[2] / "data" / "reference" / "cpu-2core"
# Stand-in for a bench: writes rows, then waits until it is ended.
SLOW = """
import sys, time
from pathlib import Path
from kit.bench.session import Book, row
book = Book("made-up", Path(sys.argv[1]))
book.begin()
for index in range(int(sys.argv[2])):
    book.keep("a", row(f"row {index}", [1.0]))
time.sleep(600)
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str], int]:
    out = tmp_path_factory.mktemp("reference") / "box"
    message: list[str] = []
    return out, message, make(out, parts=SMALL, device="cpu", factor=SLOW_BOX, say=message.append)


@pytest.mark.slow
def test_a_labs_files_have_verdict_numbers_picture_and_origin(made) -> None:
    out, _, _ = made
    reported = read_json(out / "lab-smoke.json")
    assert (reported["exit"], reported["state"], reported["command"]) == (
        0,
        "no check failed",
        "kit run smoke --set cycles=2",
    )
    assert {row["check"] for row in reported["verdict"]} >= {"groups_return_to_baseline"}
    assert reported["provenance"]["versions"]["torch"]
    assert reported["seats"][0]["devices"] == ["cpu"] * reported["seats"][0]["ranks"]
    seconds = [row for row in reported["medians"] if row["metric"] == "seconds"]
    assert all(row["min"] <= row["median"] <= row["max"] and row["count"] >= 2 for row in seconds)
    assert all(row["count"] for row in reported["medians"])  # no events, which have no count
    for name in ("lab-smoke.png", "lab-smoke-dark.png"):
        assert (out / name).read_bytes().startswith(b"\x89PNG")
    assert (out / "runs" / "lab-smoke" / "records.jsonl").exists()


@pytest.mark.slow
def test_what_is_refused_is_reported_and_is_no_failure(made) -> None:
    out, message, status = made
    reported = read_json(out / "lab-refused.json")
    assert (reported["exit"], reported["state"]) == (2, "refused")
    assert "cycles must be a whole number from 1 to 1000, not 0" in reported["complaint"]
    assert status == 0
    assert message[1] == "1 of 2, lab-smoke ..."


@pytest.mark.slow
def test_the_page_lists_every_part_and_who_sat_where(made) -> None:
    text = (made[0] / "README.md").read_text()
    assert text.startswith("# Reference: box\n")
    assert "cores" in text
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| lab-")]
    assert [row[0].removeprefix("| ") for row in rows] == ["lab-smoke", "lab-refused"]
    assert rows[0][2] == "no check failed"
    assert rows[0][5].startswith("2 ranks on cpu (")
    assert "seconds: measured on two idle cores, times 60 for this box" in text


@pytest.mark.slow
def test_it_goes_on_where_it_was(made) -> None:
    out, _, _ = made
    before = (out / "lab-smoke.json").stat().st_mtime_ns
    message: list[str] = []
    again = (SMALL[0], lab("smoke", 3, "another", cycles=1))
    assert make(out, parts=again, device="cpu", factor=SLOW_BOX, say=message.append) == 0
    assert message[1] == "1 of 2, lab-smoke: there already"
    assert (out / "lab-smoke.json").stat().st_mtime_ns == before
    assert read_json(out / "lab-another.json")["state"] == "no check failed"


# -- limits ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "state", "is_through"), [(2, "timed out with 2 rows", True), (0, "timed out without a row", False)]
)
def test_a_part_that_timed_out_with_rows_is_settled(
    rows: int, state: str, is_through: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A real process is ended by its limit. A stand-in takes the bench's place: it writes rows, then waits."""
    part = bench("sync", 9, "digests")
    file = tmp_path / "rows" / f"{part.name}.jsonl"
    plain = reference.finish

    def finish(command: list[str], limit_s: float) -> Any:
        assert command[command.index("--out") + 1] == str(file)
        process = subprocess.Popen([sys.executable, "-c", SLOW, file, str(rows)])
        while not file.exists() or file.read_text().count("\n") < 1 + rows:
            assert process.poll() is None
        process.kill()
        process.wait()
        return plain([sys.executable, "-c", "import time; time.sleep(600)"], 0.1)

    monkeypatch.setattr(reference, "finish", finish)
    reported = perform(tmp_path, part, 0.1, 0.0)
    assert (reported["state"], reported["timed_out"]) == (state, True)
    assert reported["complaint"] == "it took more than 0.1 s and was ended"
    assert [one["what"] for one in reported.get("rows", ())] == [f"row {index}" for index in range(rows)]
    assert settled(tmp_path, part) is is_through
    message: list[str] = []
    monkeypatch.setattr(reference, "perform", lambda *_: {"state": "again", "seconds": 0, "predicted": 0})
    make(tmp_path, parts=[part], device="cpu", factor=1.0, say=message.append)
    assert message[1] == (
        "1 of 1, bench-sync.digests: there already" if is_through else "1 of 1, bench-sync.digests ..."
    )


def test_a_bench_that_measured_nothing_is_seen_on_the_page() -> None:
    rows = [{"median": 1.0}, {"median": None}]
    assert reference.state({"timed_out": False, "exit": 0, "rows": rows}) == "measured 1 of 2 rows"
    assert reference.state({"timed_out": False, "exit": 3, "rows": rows}) == "broke"
    assert reference.state({"timed_out": False, "exit": 0, "verdict": []}) == "no check failed"


@pytest.mark.parametrize(
    ("reported", "is_through"),
    [
        ({"exit": 0}, True),
        ({"exit": 1}, True),
        ({"exit": 2}, True),
        ({"exit": 3, "rows": [{}]}, False),
        ({"exit": 130, "rows": [{}]}, False),
        ({"exit": -9, "timed_out": True, "rows": [{}]}, True),
        ({"exit": 130, "timed_out": True, "medians": [{}]}, True),
        ({"exit": 130, "timed_out": True, "medians": []}, False),
        ({}, False),
    ],
)
def test_what_counts_as_settled(reported: dict[str, Any], is_through: bool) -> None:
    assert is_settled(reported) is is_through


def test_limits_follow_the_box_and_end_with_the_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts and clock are fake: each part takes two minutes."""
    clock, limits = [0.0], {}

    def takes(out: Path, part: Part, limit_s: float, predicted_s: float) -> dict[str, Any]:
        limits[part.name] = limit_s
        clock[0] += 120
        reported = {"part": part.name, "exit": 0, "state": "well", "seconds": 120, "predicted": predicted_s}
        write_json(out / f"{part.name}.json", {**reported, "command": "kit", "complaint": ""})
        return reported

    monkeypatch.setattr(reference, "perform", takes)
    monkeypatch.setattr(reference.time, "monotonic", lambda: clock[0])
    parts = [
        Part(name=name, command=("bench", name), seconds=seconds)
        for name, seconds in (("first", 20), ("second", 50), ("long", 35), ("short", 15))
    ]
    message: list[str] = []
    assert (
        make(
            tmp_path,
            parts=parts,
            device="cpu",
            factor=2.0,
            minutes=5,
            pack=tmp_path.with_suffix(".tgz"),
            say=message.append,
        )
        == 0
    )
    assert limits == {"first": 100, "second": 180, "short": 60}
    assert message[5] == "3 of 4, long: 60 s were left of 5 min: run `kit reference` again"
    text = (tmp_path / "README.md").read_text()
    assert "Not run: long: 60 s were left of 5 min: run `kit reference` again." in text
    with tarfile.open(tmp_path.with_suffix(".tgz")) as tar:
        assert f"{tmp_path.name}/short.json" in tar.getnames()
    clock[0] = 0.0
    assert make(tmp_path, parts=parts, device="cpu", factor=2.0, minutes=5, say=message.append) == 0
    assert read_json(tmp_path / "long.json")["state"] == "well"


@pytest.mark.slow
def test_a_lab_past_its_limit_keeps_what_it_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real run of many cycles. Its limit expires once 20 records exist, however fast this machine is."""
    part, limit_s = lab("smoke", 3, "late", cycles=1000), 7.5
    records = tmp_path / "runs" / part.name / "records.jsonl"

    class Process(subprocess.Popen):
        def communicate(self, input: Any = None, timeout: float | None = None) -> Any:  # noqa: A002 - the parent's name
            if timeout != limit_s:
                return super().communicate(input)
            while not records.exists() or records.read_text().count("\n") < 20:
                assert self.poll() is None
                time.sleep(0.05)
            raise subprocess.TimeoutExpired(self.args, limit_s)

    monkeypatch.setattr(reference.subprocess, "Popen", Process)
    reported = perform(tmp_path, part, limit_s, 1.0)
    assert reported["state"] == f"timed out with {len(reported['medians'])} rows"
    assert reported["verdict"]
    assert settled(tmp_path, part)


# -- what a part leaves ----------------------------------------------------------------------------------------------------


def test_rows_that_a_bench_wrote_are_kept_however_it_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for the process decides how the bench ends."""

    def broke(command: list[str], _: float) -> tuple[int, str, str, bool]:
        book = Book("sync", Path(command[command.index("--out") + 1]))
        book.begin()
        book.keep("a", row("slow", [2.0], limit=1.0))
        book.seat({"ranks": 2, "devices": ["cuda:0", "cuda:0"], "why": "asked for"})
        return 3, "what  who\nslow  kit\n", "died", False

    monkeypatch.setattr(reference, "finish", broke)
    perform(tmp_path, bench("sync", 9), 1.0, 1.0)
    kept = read_json(tmp_path / "bench-sync.json")
    assert ([one["what"] for one in kept["rows"]], kept["exit"], kept["state"]) == (["slow"], 3, "broke")
    assert (tmp_path / "bench-sync.txt").read_text() == "what  who\nslow  kit\n"
    assert not settled(tmp_path, bench("sync", 9))
    write_page(tmp_path, [bench("sync", 9)], "the plan", {})
    (line,) = [one for one in (tmp_path / "README.md").read_text().splitlines() if one.startswith("| bench-sync")]
    assert line.endswith("| 2 ranks on cuda:0 (asked for) | slow |")


def test_an_interrupted_reference_keeps_what_the_part_had_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(command: list[str], _: float) -> None:
        Book("sync", Path(command[command.index("--out") + 1])).begin()
        Book("sync", Path(command[command.index("--out") + 1])).keep("a", row("one", [2.0]))
        raise KeyboardInterrupt

    monkeypatch.setattr(reference, "finish", interrupted)
    part = bench("sync", 9, "digests")
    with pytest.raises(KeyboardInterrupt):
        make(tmp_path, parts=[part], device="cpu", factor=1.0, say=lambda _: None)
    kept = read_json(tmp_path / "bench-sync.digests.json")
    assert ([one["what"] for one in kept["rows"]], kept["state"]) == (["one"], "interrupted")
    assert "| interrupted |" in (tmp_path / "README.md").read_text()
    assert not settled(tmp_path, part)


def test_rows_of_an_earlier_try_are_not_taken_for_new_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rows").mkdir()
    book = Book("sync", tmp_path / "rows" / "bench-sync.jsonl")
    book.keep("a", row("old", [1.0]))
    monkeypatch.setattr(reference, "finish", lambda *_: (3, "", "died", False))
    reported = perform(tmp_path, bench("sync", 9), 1.0, 1.0)
    assert "rows" not in reported


def test_what_was_recorded_by_hand_is_recorded_anew(tmp_path) -> None:
    (tmp_path / "bench-sync.json").write_text(json.dumps({"bench": "sync", "rows": []}))
    assert not settled(tmp_path, bench("sync", 9))
    write_page(tmp_path, [bench("sync", 9)], "the plan", {})
    assert "Not there yet: bench-sync." in (tmp_path / "README.md").read_text()


def test_what_fell_short_is_named() -> None:
    reported = {
        "verdict": [{"check": "a", "passed": False}, {"check": "b", "passed": None}],
        "rows": [{"what": "slow", "met": False}, {"what": "quick", "met": True}, {"what": "free", "met": None}],
    }
    assert short_of(reported) == ["a", "slow"]


def test_a_pack_is_one_small_file_with_the_most_telling_first(tmp_path: Path) -> None:
    box = tmp_path / "box"
    sizes = {"README.md": 100, "a.json": 30_000, "a.png": 40_000, "a-dark.png": 45_000, "runs/a/records.jsonl": 60_000}
    for index, (name, size) in enumerate(sizes.items()):
        (box / name).parent.mkdir(parents=True, exist_ok=True)
        (box / name).write_bytes(noise(index, size))
    to, most = tmp_path / "box.tgz", 150_000
    assert pack_into(box, to, most=most) == ["a-dark.png", "runs/a/records.jsonl"]
    assert to.stat().st_size <= most
    with tarfile.open(to) as tar:
        assert tar.getnames() == [f"box/{name}" for name in ("README.md", "a.json", "a.png", LEFT_OUT)]
        listed = tar.extractfile(f"box/{LEFT_OUT}")
        assert listed is not None
        assert listed.read().decode() == "a-dark.png\nruns/a/records.jsonl"
    assert pack_into(box, to) == []


def noise(seed: int, size: int) -> bytes:
    import random

    return random.Random(seed).randbytes(size)


# -- which parts ----------------------------------------------------------------------------------------------------------


def test_a_folder_that_is_a_file_is_refused(tmp_path) -> None:
    (tmp_path / "taken").write_text("")
    with pytest.raises(BadInput, match=r"cannot make the folder .*taken: File exists"):
        make(tmp_path / "taken", parts=())
    with pytest.raises(BadInput, match=r"cannot make the folder .*below: Not a directory"):
        make(tmp_path / "taken" / "below", parts=())
    with pytest.raises(BadInput, match=r"cannot make the folder .*: File exists"):
        make(tmp_path / "box", parts=(), device="cpu", factor=1.0, pack=tmp_path / "taken" / "box.tgz")


@pytest.mark.parametrize("parts", [on_cpu(), on_gpus()], ids=["cpu", "gpus"])
def test_every_lab_and_bench_has_its_part_with_settings_that_are_there(parts) -> None:
    """`view` needs Jupyter's environment, `limits` runs the parts itself, and `stream` and `share` measure waits, not GPU times."""
    assert {part.lab for part in parts if part.lab} == set(discover().labs)
    wanted = set(benches()) - {"view", "limits"} - ({"stream", "share"} if parts == on_gpus() else set())
    assert {part.command[1] for part in parts if not part.lab} == wanted
    assert len({part.name for part in parts}) == len(parts)
    for part in parts:
        if part.lab:
            validate(find(part.lab), part.settings)
            continue
        asked_for = pkgutil.resolve_name(BENCHES[part.command[1]])
        sizes = asked_for.quick if "--quick" in part.command else {}
        asked = [word for option, word in itertools.pairwise(part.command) if option == "--part"]
        assert chosen(part.name, asked_for.parts("cuda" if "cuda" in part.command else "cpu", **sizes), asked)


@pytest.mark.parametrize(
    ("here", "asked", "device"), [("cpu", "auto", "cpu"), ("cuda", "auto", "cuda"), ("cuda", "cpu", "cpu")]
)
def test_sizes_are_those_of_the_box(tmp_path, monkeypatch, here, asked, device) -> None:
    """Doctor's result is fake, so no GPU is needed."""
    found = {"problems": [], "ranks": {"device": here, "suspend_why": None}}
    monkeypatch.setattr(reference.doctor, "examine", lambda: found)
    parts = on_cpu() if device == "cpu" else list(on_gpus())
    assert sizes_here(tmp_path, asked) == (device, parts, {}, found)
    assert read_json(tmp_path / "doctor.json")["ranks"]["device"] == here


def test_a_gpu_that_cannot_be_had_is_refused_with_the_reason(tmp_path, monkeypatch) -> None:
    found = {"problems": [], "ranks": {"device": "cpu", "device_why": "torch is a build without CUDA"}}
    monkeypatch.setattr(reference.doctor, "examine", lambda: found)
    with pytest.raises(BadInput, match="device=cuda cannot be had: torch is a build without CUDA"):
        sizes_here(tmp_path, "cuda")


def test_a_box_where_labs_cannot_run_is_refused(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(reference.doctor, "examine", lambda: {"problems": ["no torch"], "ranks": None})
    with pytest.raises(BadInput, match="labs cannot run here: no torch"):
        sizes_here(tmp_path, "auto")


def test_a_plan_for_a_gpu_asks_nothing_of_this_box_and_is_the_one_in_the_docs(capsys, monkeypatch) -> None:
    monkeypatch.setattr(reference.doctor, "examine", lambda: pytest.fail("this box was asked"))
    assert plan(None, device="cuda", assumed=True) == 0
    message = capsys.readouterr().out
    lines = message.splitlines()
    assert lines[0] == "seconds: assumed for one H200 with two ranks on it, times 1 for this box"
    assert [line.split()[0] for line in lines[3:-1]] == [part.name for part in on_gpus() if not part.needs]
    docs = Path(__file__).resolve().parents[2] / "docs" / "reference.md"
    assert f"```\n{message}```" in docs.read_text()


def test_one_gpu_is_through_in_time_and_the_most_telling_comes_first() -> None:
    """With assumed times, where NCCL cannot suspend, as on a box with torch 2.11."""
    parts, missing = able(on_gpus(), ASSUMED_BOX)
    assert missing == {"lab-offload-suspend": "NCCL 2.28.9 cannot suspend communicators"}
    assert 20 + sum(part.seconds for part in parts) < 60 * GPU_MINUTES  # with 20 s for doctor and the speed factor
    order = [part.name for part in parts]
    wanted = ["lab-offload-exact", "bench-release.own", "lab-split-bfloat16", "bench-sync.gpus-shm", "lab-smoke"]
    assert sorted(wanted, key=order.index) == wanted
    assert able(on_gpus(), {"ranks": {"suspend_why": None}}) == (list(on_gpus()), {})


def test_what_claims_a_gpu_asks_for_it() -> None:
    for part in on_gpus():
        asked = part.settings.get("device") == "cuda" or "cuda" in part.command
        assert asked or part.command[1] == "world", part  # the world bench runs its ranks on the CPU


def test_the_predictions_for_two_cores_are_near_what_was_recorded() -> None:
    """Recorded per bench on an idle machine, so the predictions for a bench's parts are added up. `offload`, `split` and
    `world` are left out: their recordings had more parts."""
    predicted: dict[str, float] = {}
    for part in on_cpu():
        name = part.name.partition(".")[0]
        if (RECORDED / f"{name}.json").exists() and name not in {"bench-offload", "bench-split", "bench-world"}:
            predicted[name] = predicted.get(name, 0.0) + part.seconds
    measured = {name: read_json(RECORDED / f"{name}.json")["seconds"] for name in predicted}
    ratios = {name: measured[name] / seconds for name, seconds in predicted.items() if measured[name] > 3}
    assert len(ratios) > 8
    assert {name: ratio for name, ratio in ratios.items() if not 1 / 1.5 < ratio < 1.5} == {}


def test_a_plan_has_a_line_for_each_part_and_their_sum() -> None:
    lines = plan_text([lab("smoke", 2), lab("offload", 20)], 2.0, "cpu", 8).splitlines()
    assert lines[0] == "seconds: measured on two idle cores, times 2 for this box"
    assert lines[1].endswith("no part starts that would not end within 8 min")
    assert lines[2].split(maxsplit=1) == ["lab-smoke", f"4.0 s, limit    {LEAST_S:g} s"]
    assert lines[3].split(maxsplit=1) == ["lab-offload", "40.0 s, limit   100 s"]
    assert lines[-1].split()[:4] == ["in", "all", "44.0", "s,"]


FOUND: dict[str, Any] = {"ranks": {"torch": "2.13.0", "nccl": None}, "gpu": {"gpus": []}}


def times(device: str, by: float) -> dict[str, Any]:
    return {**preflight.box(FOUND, device), **{name: by * one for name, one in reference.PROBE_S[device].items()}}


def test_times_come_from_the_folder_then_from_doctor_and_then_from_a_probe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The probe is a stand-in, because a real one would start ranks."""
    asked: list[str] = []
    monkeypatch.setattr(preflight, "measure", lambda _, device: asked.append(device) or times(device, len(asked)))
    monkeypatch.setattr(reference, "runs_dir", lambda: tmp_path)

    def factor(folder: str, device: str = "cpu") -> float:
        (tmp_path / folder).mkdir(exist_ok=True)
        return scale(find_times(tmp_path / folder, FOUND, device), device)[0]

    assert (factor("a"), factor("a"), asked) == (1.0, 1.0, ["cpu"])
    assert (factor("a", "cuda"), asked) == (2.0, ["cpu", "cuda"])
    write_json(tmp_path / preflight.TIMES, times("cpu", 5))
    assert factor("b") == 5.0
    write_json(tmp_path / preflight.TIMES, {**times("cpu", 6), "host": "elsewhere"})
    assert (factor("b"), factor("c"), len(asked)) == (5.0, 3.0, 3)
    unmeasured = {name: value for name, value in times("cpu", 7).items() if name not in reference.PROBE_S["cpu"]}
    write_json(tmp_path / preflight.TIMES, unmeasured)
    assert factor("d") == 4.0


def test_a_factor_is_a_sum_over_a_sum_of_what_was_measured_and_shown() -> None:
    one = reference.PROBE_S["cpu"]
    name = next(iter(one))
    assert scale({name: 3 * one[name]}, "cpu")[0] == 3.0
    factor, why = scale(times("cpu", 2), "cpu")
    assert factor == 2.0
    assert all(f"{2 * one[name]:.2f} s (there {one[name]:g} s)" in why for name in one)
    assert scale({}, "cpu") == (1.0, "no probe gave a time: `kit doctor --deep` says why")
    assert why in plan_text([lab("smoke", 2)], factor, "cpu", None, why).splitlines()


@pytest.mark.slow
def test_a_probe_measures_every_time_that_scales_the_parts(nothing_left: None) -> None:
    found = {**FOUND, "ranks": {**FOUND["ranks"], "device": "cpu"}}
    assert reference.known(preflight.measure(found, "cpu"), "cpu") == list(reference.PROBE_S["cpu"])


def test_names_are_those_of_files() -> None:
    assert (lab("offload", 9, "offload-exact").name, bench("sync", 9).name) == ("lab-offload-exact", "bench-sync")


@pytest.mark.parametrize("name", benches())
def test_every_bench_can_be_quick(name: str) -> None:
    asked_for = pkgutil.resolve_name(BENCHES[name])
    full = {name: one.default for name, one in inspect.signature(asked_for.parts).parameters.items()}
    assert asked_for.quick
    assert all(full[name] != size for name, size in asked_for.quick.items())
