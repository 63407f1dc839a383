"""The numbers that a run sends to experiment trackers: the points of its curves, and the trackers' own readers reading them back."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean

import pytest

import kit
from kit.cli import main
from kit.results.curves import CurvePoint, CycleCurves
from kit.results.records import Row
from kit.stream.curves import UpdateCurves
from kit.stream.settings import StreamSettings
from kit.stream.simulated import simulate
from kit.trackers import Following, tracker_opener

SETTINGS = StreamSettings(steps=3, groups=4, group=2, train_global_batch_size=4)  # two updates per step


def measured(cycle: int, value: float | None, *, metric: str = "seconds", phase: str = "reload", rank: int = 0) -> Row:
    return Row(metric=metric, value=value, unit="s", time=0.0, cycle=cycle, phase=phase, rank=rank)


def loop_rows(phase: str = "stream") -> list[Row]:
    """The ledger of a simulated loop, with results of the trainer that arrive two rows after they were measured."""
    ledger = simulate(SETTINGS).rows
    rows: list[Row] = []
    late: list[tuple[int, Row]] = []
    for at, row in enumerate(ledger):
        rows.append(row)
        if row.event == "finish":
            ids = {"step": row["step"], "update": row["update"]}
            late.append((at + 4, Row(metric="global_loss", value=float(at), time=row.time, ids=ids, rank=0)))
        rows += [result for due, result in late if due == at]
    return [replace(row, phase=phase) for row in rows]


def test_a_cycle_is_one_point_with_the_median_over_ranks() -> None:
    curves = CycleCurves()
    rows = [measured(0, 9.0), measured(1, 1.0), measured(1, 3.0, rank=1), measured(1, 8.0, rank=2), measured(1, None)]
    rows += [measured(1, 7.0, metric="rss_before"), measured(2, 5.0), measured(0, 4.0, phase="run")]
    points = [*curves.see(rows), *curves.close(), *curves.close()]
    assert points == [CurvePoint("cycle", x, {"reload/seconds": value}) for x, value in ((0, 9.0), (1, 3.0), (2, 5.0))]


def test_an_update_is_one_point_with_results_counts_times_and_rollouts() -> None:
    rows, curves = loop_rows(), UpdateCurves()
    points = [point for row in rows for point in curves.see([row])]
    assert len(points) >= 4  # most of them while the loop runs
    points += curves.close()
    assert [point.x for point in points] == [1, 2, 3, 4, 5, 6]
    assert {point.axis for point in points} == {"update"}

    trained = defaultdict(list)
    for row in rows:
        if row.event == "trained":
            trained[row["step"], row["update"]].append(row["group"])
    for point, (key, groups) in zip(points, trained.items(), strict=True):
        samples = [row for row in rows if row.event == "completed" and row["group"] in groups]
        (logged,) = (row for row in rows if row.event == "logged" and (row["step"], row["update"]) == key)
        (counts,) = (row for row in rows if row.event == "metrics" and (row["step"], row["update"]) == key)
        (loss,) = (row for row in rows if row.metric == "global_loss" and (row["step"], row["update"]) == key)
        values = {name.removeprefix("stream/"): value for name, value in point.values.items()}
        assert values["train/global_loss"] == loss.value
        assert values["rollout/reward"] == fmean(float(row["reward"]) for row in samples)
        assert values["counts/lag_mean"] == float(counts["lag_mean"])
        for part in ("training", "logprobs", "sync", "exposed_generation", "replicas_idle"):
            assert values[f"timing/{part}"] == float(logged[f"s_{part}"])
        tokens = sum(row.number("length") for row in samples)
        assert values["timing/tokens_per_second"] == pytest.approx(tokens / float(logged["s_total"]))
        assert values["timing/clear"] >= 0


def test_loops_of_a_run_have_points_of_their_own() -> None:
    curves = UpdateCurves()
    points = [*curves.see([*loop_rows("lockstep"), *loop_rows("stream")]), *curves.close()]
    seen = [(name, point.x) for point in points for name in point.values]
    assert len(seen) == len(set(seen))
    assert {name.partition("/")[0] for name, _ in seen} == {"lockstep", "stream"}


def test_loops_of_one_phase_share_no_point() -> None:
    """Each numbers its updates from 0, as the loops of the phase rehearse do."""
    ledger = [row for row in loop_rows() if row.value is None]
    points = []
    for rows in (ledger, [*ledger, *ledger]):
        curves = UpdateCurves()
        points.append([*curves.see(rows), *curves.close()])
    once, again = points
    assert again == [*once, *(point._replace(x=point.x + len(once)) for point in once)]


def test_a_loop_without_results_of_a_trainer_has_its_points_at_the_end() -> None:
    curves = UpdateCurves()
    assert [*curves.see([row for row in loop_rows() if row.value is None])] == []
    assert [point.x for point in curves.close()] == [1, 2, 3, 4, 5, 6]


def test_an_update_counts_even_if_the_loop_stopped_before_it_was_logged() -> None:
    rows = loop_rows()
    unlogged = next(row for row in rows if row.event == "logged")
    curves = UpdateCurves()
    points = [*curves.see([row for row in rows if row is not unlogged]), *curves.close()]
    assert [point.x for point in points] == [1, 2, 3, 4, 5, 6]
    assert ["stream/timing/sync" in point.values for point in points] == [False, True, True, True, True, True]


def test_what_is_no_number_is_left_out() -> None:
    odd = {"metrics": {"note": "warm"}, "completed": {"reward": "none"}, "logged": {"s_sync": "?"}}
    rows = [replace(row, ids={**row.ids, **odd.get(row.event, {})}) for row in loop_rows()]
    curves = UpdateCurves()
    points = [*curves.see(rows), *curves.close()]
    assert [point.x for point in points] == [1, 2, 3, 4, 5, 6]
    names = {name for point in points for name in point.values}
    assert not names & {"stream/counts/note", "stream/rollout/reward", "stream/timing/sync"}
    assert names >= {"stream/counts/groups", "stream/rollout/length", "stream/timing/training"}


@dataclass
class Kept:
    fails: bool = False
    points: list[CurvePoint] = field(default_factory=list)
    closed: int = 0

    def log(self, point: CurvePoint) -> None:
        if self.fails:
            raise ConnectionError("the server is gone")
        self.points.append(point)

    def close(self) -> None:
        self.closed += 1


def test_a_tracker_that_fails_is_left_out_and_the_others_go_on() -> None:
    good, bad = Kept(), Kept(fails=True)
    following = Following({"bad": bad, "good": good}, [CycleCurves()])
    with pytest.warns(RuntimeWarning, match="--log bad failed: ConnectionError: the server is gone") as warned:
        following.see([measured(0, 1.0), measured(1, 2.0), measured(2, 3.0)])
    following.close()
    following.close()
    assert len(warned) == 1
    assert [point.x for point in good.points] == [0, 1, 2]
    assert (good.closed, bad.closed) == (1, 0)


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        ("tensorbord:DIR", "did you mean 'tensorboard'"),
        ("tensorboard", "--log tensorboard needs a folder, as in tensorboard:DIR"),
        ("wandb", "--log wandb needs the package wandb: pip install wandb"),
        ("trackio:mine", "--log trackio needs the package trackio: pip install trackio"),
    ],
)
def test_what_cannot_be_logged_to_is_one_sentence_before_a_run_begins(
    asked: str, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("wandb", "trackio"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setenv("KIT_RUNS", str(tmp_path / "runs"))
    assert main(["run", "smoke", "--log", asked]) == 2
    assert sentence in capsys.readouterr().err
    with pytest.raises(kit.BadInput, match=sentence):
        kit.run("smoke", log=asked)
    assert not (tmp_path / "runs").exists()


def test_a_folder_that_is_a_file_is_bad_input(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(kit.BadInput, match="cannot make the folder"):
        tracker_opener(f"tensorboard:{tmp_path / 'file'}")


def in_a_process(script: str, *words: str, cwd: Path) -> str:
    """Trackers change their process: they set variables and start threads."""
    command = [sys.executable, "-c", f"from kit.trackers import *\nimport sys\n{script}", *words]
    done = subprocess.run(command, capture_output=True, text=True, cwd=cwd, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


POINTS = """
following = tracker_opener(sys.argv[1])("a run", {"cycles": 2, "layers": None}, [])
(tracker,) = following._trackers.values()
for x in (1, 2):
    tracker.log(CurvePoint("cycle", x, {"reload/seconds": 0.5 * x}))
tracker.log(CurvePoint("update", 1, {"stream/train/grad_norm": 2.0}))
following.close()
"""


def test_tensorboards_own_reader_reads_the_points(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    in_a_process(POINTS, f"tensorboard:{tmp_path / 'boards'}", cwd=tmp_path)
    assert read_board(tmp_path / "boards" / "a run") == {
        "reload/seconds": [(1, 0.5), (2, 1.0)],
        "stream/train/grad_norm": [(1, 2.0)],
    }


def read_board(folder: Path) -> Mapping[str, Sequence[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.util.tensor_util import make_ndarray

    events = EventAccumulator(str(folder), size_guidance={"tensors": 0})
    events.Reload()
    return {
        name: [(event.step, float(make_ndarray(event.tensor_proto))) for event in events.Tensors(name)]
        for name in events.Tags()["tensors"]
    }


READ_WANDB = """
import json, pathlib
from wandb.proto import wandb_internal_pb2 as pb
(file,) = pathlib.Path().glob("wandb/offline-run-*/*.wandb")
data, at = file.read_bytes(), 7
while at + 7 <= len(data):  # records of less than one block
    length = int.from_bytes(data[at + 4 : at + 6], "little")
    record = pb.Record.FromString(data[at + 7 : at + 7 + length])
    at += 7 + length
    if record.WhichOneof("record_type") == "history":
        items = {".".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
        print(json.dumps({name: value for name, value in items.items() if not name.startswith("_")}))
"""


def test_wandb_gets_the_points_in_its_offline_mode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="wandb is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    in_a_process(POINTS, "wandb:mine", cwd=tmp_path)
    assert [json.loads(line) for line in in_a_process(READ_WANDB, cwd=tmp_path).splitlines()] == [
        {"reload/seconds": 0.5, "cycle": 1},
        {"reload/seconds": 1.0, "cycle": 2},
        {"stream/train/grad_norm": 2.0, "update": 1},
    ]


def test_trackio_gets_the_points(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("trackio", reason="trackio is not installed")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    in_a_process(POINTS, "trackio:mine", cwd=tmp_path)
    (database,) = (tmp_path / "trackio").rglob("mine*.db")
    with sqlite3.connect(database) as connection:
        rows = connection.execute("select step, metrics from metrics order by id").fetchall()
    assert [step for step, _ in rows] == [1, 2, 1]
