"""`kit reference`: a few small parts in real processes; an interrupted reference resumes where it stopped."""

from __future__ import annotations

import itertools
import json
import shutil
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kit import cli, reference
from kit.cli import benches
from kit.errors import BadInput
from kit.labs.bench import Samples
from kit.labs.definition import BenchConfig
from kit.labs.discover import find, tagged, validate
from kit.reference import (
    GPU_MINUTES,
    LEAST_S,
    LEFT_OUT,
    NEVER_S,
    ReferencePart,
    able,
    bench,
    gpu_parts,
    is_settled,
    lab_part,
    last_time,
    make_reference,
    on_cpu,
    pack_into,
    part_settled,
    perform,
    plan_text,
    print_plan,
    short_of,
    sizes_here,
    write_page,
)
from kit.results import Row, create_run
from kit.results.records import read_json, write_json
from tests.bench.recorded import Kept

SMALL = (lab_part("smoke", cycles=2), lab_part("smoke", "refused", cycles=0))


def record(out: Path, *samples: Samples) -> None:
    """Write a run of a bench with these samples, as its process does."""
    from kit.labs.bench import Bench

    out.parent.mkdir(parents=True, exist_ok=True)
    writer = create_run(out.parent, "bench-sync", {}, {}, out=out)
    drive: Any = Kept(out)
    for measured in samples:
        Bench.keep(SimpleNamespace(drive=drive, sharing=False), measured)  # type: ignore[arg-type]
    about: dict[str, Any] = {
        "run": writer.id,
        "lab": "bench-sync",
        "cycle": 0,
        "phase": "digests",
        "rank": -1,
        "role": "",
    }
    writer.append([Row.placed(row.facts(), **about) for row in drive.rows])
    seat = {
        "metric": "seat",
        "value": 2,
        "unit": "1",
        "time": 1.0,
        "text": "asked for",
        "ids": {"devices": "cuda:0,cuda:0"},
    }
    writer.append([Row.placed(seat, **about)])


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str], int]:
    out = tmp_path_factory.mktemp("reference") / "box"
    message: list[str] = []
    return out, message, make_reference(out, parts=SMALL, device="cpu", say=message.append)


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


@pytest.mark.slow
def test_the_rows_of_a_lab_can_be_judged_again_at_home(made, tmp_path: Path, capsys) -> None:
    """Limits can be tuned against them after the box is gone."""
    out, _, _ = made
    home = shutil.copytree(out / "runs" / "lab-smoke", tmp_path / "home")
    assert cli.main(["check", str(home), "--json"]) == 0
    judged = json.loads(capsys.readouterr().out)
    assert judged["verdict"] == read_json(out / "lab-smoke.json")["verdict"]
    assert judged["changes"] == []


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


@pytest.mark.slow
def test_it_goes_on_where_it_was(made) -> None:
    out, _, _ = made
    before = (out / "lab-smoke.json").stat().st_mtime_ns
    message: list[str] = []
    again = (SMALL[0], lab_part("smoke", "another", cycles=1))
    assert make_reference(out, parts=again, device="cpu", say=message.append) == 0
    assert message[1] == "1 of 2, lab-smoke: there already"
    assert (out / "lab-smoke.json").stat().st_mtime_ns == before
    assert read_json(out / "lab-another.json")["state"] == "no check failed"


# -- limits ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rows", "is_through"), [(2, True), (0, False)])
def test_a_part_that_timed_out_with_rows_is_settled(
    rows: int, is_through: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A real process is ended by its limit. A stand-in takes the bench's place: it writes rows, then waits."""
    part = bench("sync", "digests")
    plain = reference.finish_part

    def finish(command: list[str], limit_s: float) -> Any:
        record(
            Path(command[command.index("--out") + 1]), *(Samples(what=f"row {n}", values=[1.0]) for n in range(rows))
        )
        return plain([sys.executable, "-c", "import time; time.sleep(600)"], 0.1)

    monkeypatch.setattr(reference, "finish_part", finish)
    reported = perform(tmp_path, part, 0.1)
    state = f"timed out with {rows} rows" if rows else "timed out without a row"
    assert (reported["state"], reported["timed_out"]) == (state, True)
    assert reported["complaint"] == "it took more than 0.1 s and was ended"
    assert [row["what"] for row in reported.get("rows", ())] == [f"row {index}" for index in range(rows)]
    assert part_settled(tmp_path, part) is is_through


def test_a_bench_that_measured_nothing_is_seen_on_the_page() -> None:
    rows = [{"median": 1.0}, {"median": None}]
    assert reference.part_state({"timed_out": False, "exit": 0, "rows": rows}) == "measured 1 of 2 rows"
    assert reference.part_state({"timed_out": False, "exit": 3, "rows": rows}) == "broke"
    assert reference.part_state({"timed_out": False, "exit": 0, "verdict": []}) == "no check failed"


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


def test_limits_follow_the_last_time_and_end_with_the_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts and clock are fake: each part takes two minutes, and was broken last time, after so many seconds."""
    clock, limits = [0.0], {}

    def takes(out: Path, part: ReferencePart, limit_s: float, last_s: float | None) -> dict[str, Any]:
        limits[part.name] = limit_s
        clock[0] += 120
        reported = {"part": part.name, "exit": 0, "state": "well", "seconds": 120, "last": last_s}
        write_json(out / f"{part.name}.json", {**reported, "command": "kit", "complaint": ""})
        return reported

    monkeypatch.setattr(reference, "perform", takes)
    monkeypatch.setattr(reference.time, "monotonic", lambda: clock[0])
    parts = [ReferencePart(name=name, command=("bench", name)) for name in ("first", "second", "long", "short")]
    for name, seconds in (("first", 25), ("second", 100), ("long", 70), ("short", 15)):
        broken = {"part": name, "exit": 3, "state": "broke", "seconds": seconds, "command": "kit", "complaint": ""}
        write_json(tmp_path / f"{name}.json", broken)
    message: list[str] = []
    pack = tmp_path.with_suffix(".tgz")
    make_reference(tmp_path, parts=parts, device="cpu", minutes=5, pack=pack, say=message.append)
    assert limits == {"first": 100, "second": 180, "short": LEAST_S}
    assert message[5] == "3 of 4, long: 60 s were left of 5 min: run `kit reference` again"
    with tarfile.open(pack) as tar:
        assert f"{tmp_path.name}/short.json" in tar.getnames()
    clock[0] = 0.0
    assert make_reference(tmp_path, parts=parts, device="cpu", minutes=5, say=message.append) == 0
    assert read_json(tmp_path / "long.json")["state"] == "well"


@pytest.mark.slow
def test_a_lab_past_its_limit_keeps_what_it_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real run of many cycles. Its limit expires once 20 records exist, however fast this machine is."""
    part, limit_s = lab_part("smoke", "late", cycles=1000), 7.5
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
    reported = perform(tmp_path, part, limit_s)
    assert reported["state"] == f"timed out with {len(reported['medians'])} rows"
    assert reported["verdict"]
    assert part_settled(tmp_path, part)


# -- what a part leaves ----------------------------------------------------------------------------------------------------


def test_rows_that_a_bench_wrote_are_kept_however_it_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for the process decides how the bench ends."""

    def broke(command: list[str], _: float) -> tuple[int, str, bool]:
        slow = Samples(what="slow", values=[2.0], metric="automatic_over_fixed", unit="x")
        record(Path(command[command.index("--out") + 1]), slow)
        return 3, "died", False

    monkeypatch.setattr(reference, "finish_part", broke)
    perform(tmp_path, bench("sync"), 1.0)
    kept = read_json(tmp_path / "bench-sync.json")
    assert ([row["what"] for row in kept["rows"]], kept["exit"], kept["state"]) == (["slow"], 3, "broke")
    assert (tmp_path / "bench-sync.txt").read_text().startswith("what")
    assert not part_settled(tmp_path, bench("sync"))
    write_page(tmp_path, [bench("sync")], {})
    (line,) = [one for one in (tmp_path / "README.md").read_text().splitlines() if one.startswith("| bench-sync")]
    assert line.endswith("| 2 ranks on cuda:0 (asked for) | slow |")


def test_an_interrupted_reference_keeps_what_the_part_had_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(command: list[str], _: float) -> None:
        record(Path(command[command.index("--out") + 1]), Samples(what="early", values=[2.0]))
        raise KeyboardInterrupt

    monkeypatch.setattr(reference, "finish_part", interrupted)
    part = bench("sync", "digests")
    with pytest.raises(KeyboardInterrupt):
        make_reference(tmp_path, parts=[part], device="cpu", say=lambda _: None)
    kept = read_json(tmp_path / "bench-sync.digests.json")
    assert ([row["what"] for row in kept["rows"]], kept["state"]) == (["early"], "interrupted")
    assert "| interrupted |" in (tmp_path / "README.md").read_text()
    assert not part_settled(tmp_path, part)


def test_rows_of_an_earlier_try_are_not_taken_for_new_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record(tmp_path / "runs" / "bench-sync", Samples(what="old", values=[1.0]))
    monkeypatch.setattr(reference, "finish_part", lambda *_: (3, "died", False))
    assert "rows" not in perform(tmp_path, bench("sync"), 1.0)


def test_what_was_recorded_by_hand_is_recorded_anew(tmp_path) -> None:
    (tmp_path / "bench-sync.json").write_text(json.dumps({"bench": "sync", "rows": []}))
    assert not part_settled(tmp_path, bench("sync"))
    write_page(tmp_path, [bench("sync")], {})
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
        make_reference(tmp_path / "taken", parts=())
    with pytest.raises(BadInput, match=r"cannot make the folder .*below: Not a directory"):
        make_reference(tmp_path / "taken" / "below", parts=())
    with pytest.raises(BadInput, match=r"cannot make the folder .*: File exists"):
        make_reference(tmp_path / "box", parts=(), device="cpu", pack=tmp_path / "taken" / "box.tgz")


@pytest.mark.parametrize("parts", [on_cpu(), gpu_parts()], ids=["cpu", "gpus"])
def test_every_lab_and_bench_has_its_part_with_settings_that_are_there(parts) -> None:
    """`view` needs Jupyter's environment, and `stream` and `share` measure waits, not GPU times."""
    assert {part.lab for part in parts if part.lab} == set(tagged())
    wanted = set(benches()) - {"view"} - ({"stream", "share"} if parts == gpu_parts() else set())
    assert {part.command[1] for part in parts if not part.lab} == wanted
    assert len({part.name for part in parts}) == len(parts)
    for part in parts:
        if part.lab:
            validate(find(part.lab), part.settings)
            continue
        words = [word for option, word in itertools.pairwise(part.command) if option == "--part"]
        tested = find(f"bench-{part.command[1]}")
        assert tested.plan(tested.config(parts=",".join(words), quick="--quick" in part.command))


@pytest.mark.parametrize(
    ("here", "asked", "device"), [("cpu", "auto", "cpu"), ("cuda", "auto", "cuda"), ("cuda", "cpu", "cpu")]
)
def test_sizes_are_those_of_the_box(tmp_path, monkeypatch, here, asked, device) -> None:
    """Doctor's result is fake, so no GPU is needed."""
    found = {"problems": [], "ranks": {"device": here, "suspend_why": None}}
    monkeypatch.setattr(reference.doctor, "examine", lambda: found)
    parts = on_cpu() if device == "cpu" else list(gpu_parts())
    assert sizes_here(tmp_path, asked) == (device, parts, {})
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


def test_a_plan_asks_nothing_of_this_box(capsys, monkeypatch) -> None:
    monkeypatch.setattr(reference.doctor, "examine", lambda: pytest.fail("this box was asked"))
    assert print_plan(None, device="cuda") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"no part starts that may not end within {GPU_MINUTES:g} min"
    assert [line.split()[0] for line in lines[1:-1]] == [part.name for part in gpu_parts()]
    assert all("never measured" in line for line in lines[1:-1])


def test_what_was_last_measured_is_read_from_this_folder_and_then_from_the_kits(tmp_path: Path) -> None:
    smoke = lab_part("smoke", cycles=5)
    assert last_time(None, smoke, "cpu") == (4.8, "cpu-2core")
    assert last_time(None, smoke, "cuda") == (None, "")
    write_json(tmp_path / "lab-smoke.json", {"seconds": 9.0, "seats": [{"devices": ["cpu"]}]})
    assert last_time(tmp_path, smoke, "cpu") == (9.0, tmp_path.name)
    lines = plan_text(tmp_path, [smoke, lab_part("smoke", "new")], "cpu", None).splitlines()
    assert lines[0] == f"lab-smoke  9.0 s on {tmp_path.name}, limit {LEAST_S:g} s"
    assert lines[1] == f"lab-new    never measured, limit {NEVER_S:g} s"


def test_what_nccl_lacks_is_left_out_and_the_most_telling_comes_first() -> None:
    parts, missing = able(gpu_parts(), {"ranks": {"suspend_why": "NCCL 2.28.9 cannot suspend communicators"}})
    assert missing == {"lab-offload-suspend": "NCCL 2.28.9 cannot suspend communicators"}
    order = [part.name for part in parts]
    wanted = ["lab-offload-exact", "bench-release.own", "lab-split-bfloat16", "bench-sync.gpus-shm", "lab-smoke"]
    assert sorted(wanted, key=order.index) == wanted
    assert able(gpu_parts(), {"ranks": {"suspend_why": None}}) == (list(gpu_parts()), {})


def test_what_claims_a_gpu_asks_for_it() -> None:
    for part in gpu_parts():
        asked = part.settings.get("device") == "cuda" or "cuda" in part.command
        assert asked or part.command[1] == "world", part  # the world bench runs its ranks on the CPU


def test_names_are_those_of_files() -> None:
    assert (lab_part("offload", "offload-exact").name, bench("sync").name) == ("lab-offload-exact", "bench-sync")


@pytest.mark.parametrize("name", benches())
def test_every_bench_can_be_quick(name: str) -> None:
    config = find(f"bench-{name}").config
    assert issubclass(config, BenchConfig)
    full, quick = config(), config(quick=True)
    assert config.QUICK
    assert all(getattr(full, field) != size == getattr(quick, field) for field, size in config.QUICK.items())
