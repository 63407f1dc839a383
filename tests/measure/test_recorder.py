"""The recorder writes whole records, stores how the run ended, and never stops the training."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import kit
from kit import cli
from kit.draw.data import read
from kit.errors import BadInput
from kit.measure import Recorder
from kit.results import Run
from kit.results.run import EDITED
from kit.view.report import chapter_tables

ROOT = Path(__file__).parents[2]
KEYS = ["run", "lab", "cycle", "phase", "rank", "metric", "value", "unit", "time"]
RANKS = ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "NODE_RANK", "TORCHELASTIC_RESTART_COUNT")
LAUNCH = ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT", "SLURM_JOB_ID", "RAY_JOB_ID")


@pytest.fixture(autouse=True)
def no_ranks(monkeypatch):
    for name in (*RANKS, *LAUNCH):
        monkeypatch.delenv(name, raising=False)


def rows(folder, name="records.jsonl"):
    """Who opens a file while another process is writing to it may leave an empty line, which readers pass over."""
    return [json.loads(line) for line in (folder / name).read_text().splitlines() if line]


def run_json(folder):
    return json.loads((folder / "run.json").read_text())


def script(folder, body, **env):
    text = f"import os, sys\nfrom kit.measure import Recorder\nfolder = {str(folder)!r}\n{body}"
    return subprocess.run(
        [sys.executable, "-c", text], env={**os.environ, "PYTHONPATH": str(ROOT), **env}, capture_output=True, text=True
    )


def test_a_run_from_start_to_end(tmp_path):
    folder = tmp_path / "deep/mine"
    with Recorder(folder, config={"tp": 2}) as rec:
        assert run_json(folder)["status"] == "running"
        with rec.phase("offload", cycle=3):
            rec.record("loss", torch.tensor(0.5, requires_grad=True), "nat")
        rec.record("total", 2)
    written = rows(folder)
    assert all(list(row) == KEYS for row in written)
    assert {(r["run"], r["lab"], r["rank"]) for r in written} == {("mine", "own", 0)}
    loss, *phase, total = written
    assert (loss["metric"], loss["value"], loss["unit"], loss["phase"], loss["cycle"]) == (
        "loss",
        0.5,
        "nat",
        "offload",
        3,
    )
    assert (total["phase"], total["cycle"]) == ("run", 0)
    assert {r["phase"] for r in phase} == {"offload"}
    assert {"seconds", "rss", "rss_before", "groups"} < {r["metric"] for r in phase}
    assert len({r["time"] for r in phase}) == 1
    described = run_json(folder)
    assert list(described) == [
        *(
            "run",
            "lab",
            "config",
            "status",
            "owner",
            "started",
            "finished",
            "fault",
            "error",
            "provenance",
            "kit",
            "schema",
        ),
        "launch",
        "sealed",
    ]
    assert described["config"] == {"ranks": 1, "tp": 2}
    assert (described["status"], described["error"]) == ("finished", None)
    assert sorted(p.name for p in folder.iterdir()) == ["records.jsonl", "run.json"]


def test_values_that_are_not_finite_survive(tmp_path):
    with Recorder(tmp_path / "r") as rec:
        for value in (math.nan, math.inf, -math.inf):
            rec.record("x", value)
    assert [row["value"] for row in rows(tmp_path / "r")] == ["NaN", "Infinity", "-Infinity"]  # strict JSON
    assert str(Run(tmp_path / "r").frame()["value"].tolist()) == "[nan, inf, -inf]"


def test_events_and_spans_carry_ids_and_times(tmp_path):
    with Recorder(tmp_path / "r") as rec:
        before = time.time()
        rec.event("completed", group=17, sample=torch.tensor(3), version=4, text="stop token")
        with rec.phase("rollout", cycle=2):
            with pytest.raises(ZeroDivisionError), rec.span("generate", group=17):
                raise ZeroDivisionError
            with rec.span("generate", name="also an id", text="done"):
                pass
            rec.event("waited", start=before, cycle=9)
        rec.record("loss", torch.tensor(0.5), "nat", start=before, tensor="embedding")
        after = time.time()
    event, failed, done, waited, *_, loss = rows(tmp_path / "r")
    assert (event["metric"], event["value"], event["unit"], event["phase"]) == ("completed", None, "", "run")
    assert event["ids"] == {"group": 17, "sample": 3, "version": 4}
    assert event["text"] == "stop token"
    assert "start" not in event
    assert (failed["metric"], failed["unit"], failed["text"], failed["ids"]) == (
        "generate",
        "s",
        "ZeroDivisionError",
        {"group": 17},
    )
    assert (done["text"], done["ids"], done["phase"], done["cycle"]) == ("done", {"name": "also an id"}, "rollout", 2)
    for row in (failed, done):
        assert before <= row["start"] <= row["time"] <= after
        assert 0 <= row["value"] < 60
    assert (waited["value"], waited["start"], waited["cycle"]) == (None, before, 9)
    assert (loss["value"], loss["start"], loss["ids"]) == (0.5, before, {"tensor": "embedding"})
    assert len(Run(tmp_path / "r").frame()) == len(rows(tmp_path / "r"))


def test_a_phase_that_raises_is_recorded_and_raises_the_same(tmp_path):
    error = ValueError("mine")
    with pytest.raises(ValueError, match="mine") as caught, Recorder(tmp_path / "r") as rec, rec.phase("train"):
        raise error
    assert caught.value is error
    metrics = {row["metric"]: row["value"] for row in rows(tmp_path / "r")}
    assert metrics["failed"] == 1
    assert metrics["seconds"] > 0
    assert (run_json(tmp_path / "r")["status"], run_json(tmp_path / "r")["error"]) == ("failed", "ValueError: mine")


@pytest.mark.parametrize(
    ("body", "status", "error"),
    [
        ("Recorder(folder)", "finished", None),
        ("rec = Recorder(folder); 1 / 0", "failed", "ZeroDivisionError: division by zero"),
        ("with Recorder(folder): sys.exit(3)", "failed", "SystemExit: 3"),
        ("with Recorder(folder): sys.exit()", "finished", None),
        ("with Recorder(folder): raise KeyboardInterrupt", "stopped", "KeyboardInterrupt: "),
        ("rec = Recorder(folder)\nif os.fork() == 0: sys.exit()\nos.wait()\nos.kill(os.getpid(), 9)", "running", None),
    ],
)
def test_how_the_process_ended_is_in_run_json(tmp_path, body, status, error):
    script(tmp_path / "r", body)
    reported = run_json(tmp_path / "r")
    assert (reported["status"], reported["error"]) == (status, error)
    assert (reported["finished"] is None) == (status == "running")
    assert Run(tmp_path / "r").status == ("interrupted" if status == "running" else status)


def test_a_killed_run_keeps_the_phases_it_had(tmp_path):
    body = "rec = Recorder(folder)\nwith rec.phase('a'): pass\nwith rec.phase('b'): os.kill(os.getpid(), 9)"
    assert script(tmp_path / "r", body).returncode == -signal.SIGKILL
    assert {row["phase"] for row in rows(tmp_path / "r")} == {"a"}


@pytest.mark.filterwarnings("error")
def test_a_full_disk_warns_once_and_the_training_goes_on(tmp_path):
    folder = tmp_path / "r"
    folder.mkdir()
    (folder / "records.jsonl").symlink_to("/dev/full")
    rec = Recorder(folder)
    with pytest.warns(RuntimeWarning) as caught, rec.phase("a"):
        pass
    rec.record("x", 1)  # a second warning would be an error here
    assert len(caught) == 1
    assert "No space left on device" in str(caught[0].message)
    lost = rec.lost
    assert lost > 10
    with pytest.warns(RuntimeWarning, match=f"{lost} records of rank 0 were lost"):
        rec.close()
    assert (run_json(folder)["status"], run_json(folder)["error"]) == (
        "finished",
        f"{lost} records of rank 0 were lost",
    )


def test_a_record_torn_by_the_disk_does_not_swallow_the_next(tmp_path):
    """A file size limit tears a write as a full disk does, and can be raised again."""
    body = """
import resource
rec = Recorder(folder)
rec.record("before", 1)
size = os.stat(folder + "/records.jsonl").st_size
_, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (size + 40, hard))
rec.record("torn", 1)
rec.record("refused", 1)
resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
rec.record("after", 1)
assert rec.lost == 2, rec.lost
rec.close()
"""
    done = script(tmp_path / "r", body)
    assert done.returncode == 0, done.stderr
    whole = rows(tmp_path / "r")  # the torn part was removed
    assert [(row["metric"], row["value"]) for row in whole] == [("before", 1), ("after", 1), ("lost_records", 2)]


def test_a_folder_that_cannot_be_written_is_refused_at_once(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInput, match=r"cannot record into .*: Not a directory; give a folder that can be written to"):
        Recorder(tmp_path / "file/r")
    locked = tmp_path / "locked"
    locked.mkdir()
    locked.chmod(0o555)
    done = script(locked, "if os.getuid() == 0: os.setuid(65534)\nRecorder(folder)")
    assert "BadInput: cannot record into" in done.stderr
    assert ": Permission denied; give" in done.stderr
    assert list(locked.iterdir()) == []


def test_a_folder_that_holds_a_run_is_refused_unless_torchrun_restarted_it(tmp_path, monkeypatch):
    with Recorder(tmp_path) as rec:
        rec.record("x", 1)
    with pytest.raises(BadInput, match="already holds a run"):
        Recorder(tmp_path)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    with Recorder(tmp_path) as rec:
        rec.record("x", 2)
    assert [row["value"] for row in rows(tmp_path)] == [1, 2]


def test_bad_input_is_one_sentence(tmp_path, monkeypatch):
    with pytest.raises(BadInput, match="config must be JSON values only"):
        Recorder(tmp_path / "a", config={"x": object()})
    with pytest.raises(BadInput, match="config must be JSON values only: the number 1000"):
        Recorder(tmp_path / "a", config={"x": 10**400})
    rec = Recorder(tmp_path / "b")
    with pytest.raises(BadInput, match="loss cannot be recorded: 'high' is not a number"):
        rec.record("loss", "high")
    with pytest.raises(BadInput, match=r"the id group=1.5 is neither text, a whole number nor a list"):
        rec.event("completed", group=1.5)
    with pytest.raises(BadInput, match="'rank' is a key of every row"), rec.span("generate", rank=1):
        pytest.fail("the block ran")
    with pytest.raises(BadInput, match="waited cannot start at nan"):
        rec.event("waited", start=math.nan)
    with pytest.raises(BadInput, match=r"cycle is 1.5; it must be a whole number"), rec.phase("a", cycle=1.5):
        pytest.fail("the block ran")
    rec.close()
    rec.close()
    with pytest.raises(BadInput, match="is closed"), rec.phase("late"):
        pass
    monkeypatch.setenv("RANK", "one")
    with pytest.raises(BadInput, match="RANK is 'one' in the environment"):
        Recorder(tmp_path / "c")


@pytest.mark.parametrize(
    ("env", "name"),
    [
        ({"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}, "records.jsonl"),
        ({"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1"}, "records.node1.jsonl"),
        ({"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "NODE_RANK": "1"}, "records.node1.jsonl"),
        ({"WORLD_SIZE": "4"}, "records.node3.jsonl"),
    ],
)
def test_ranks_of_one_machine_share_a_file_and_machines_do_not(tmp_path, monkeypatch, env, name):
    for key, value in {"RANK": "3", **env}.items():
        monkeypatch.setenv(key, value)
    with Recorder(tmp_path) as rec:
        rec.record("x", 1)
    assert [row["rank"] for row in rows(tmp_path, name)] == [3]
    assert [p.name for p in tmp_path.glob("[!.]*")] == [name]  # the hidden file says that this rank has closed


def test_ranks_that_write_at_once_lose_and_tear_nothing(tmp_path):
    body = "rec = Recorder(folder)\nfor i in range(300):\n    with rec.phase('p', cycle=i): pass"
    text = f"from kit.measure import Recorder\nfolder = {str(tmp_path)!r}\n{body}"
    env = {**os.environ, "PYTHONPATH": str(ROOT), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    ranks = [subprocess.Popen([sys.executable, "-c", text], env={**env, "RANK": str(rank)}) for rank in range(2)]
    assert [rank.wait() for rank in ranks] == [0, 0]
    seen = [(row["rank"], row["cycle"]) for row in rows(tmp_path) if row["metric"] == "seconds"]
    assert sorted(seen) == [(rank, cycle) for rank in range(2) for cycle in range(300)]


@pytest.mark.parametrize("last", [0, 1])
def test_the_rank_that_closes_last_seals_the_rows_of_all(tmp_path, monkeypatch, last):
    """Ranks on two machines, each with its own file."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    ranks = [Recorder(tmp_path / "r", rank=rank, world_size=2) for rank in range(2)]
    for rec in ranks:
        rec.record("x", 1)
    first = ranks[1 - last]
    first.close()
    assert "sealed" not in run_json(tmp_path / "r")
    ranks[last].record("x", 2)
    ranks[last].close()
    run = Run(tmp_path / "r")
    assert (run.notes, len(run_json(tmp_path / "r")["sealed"]["records"])) == ([], 2)
    assert sorted(p.name for p in run.dir.iterdir()) == ["records.node0.jsonl", "records.node1.jsonl", "run.json"]
    file = run.dir / f"records.node{last}.jsonl"
    file.write_text(file.read_text().partition("\n")[2])
    assert Run(run.dir).notes == [f"{file.name}: 1 row of 2 is missing"]


def test_a_config_that_is_edited_after_the_end_is_named(tmp_path):
    with Recorder(tmp_path / "r", rank=0, world_size=1, config={"lr": 0.1, "shape": (2, 3), "path": "\udcff"}) as rec:
        rec.record("x", 1)
    assert Run(tmp_path / "r").notes == []
    path = tmp_path / "r" / "run.json"
    path.write_text(path.read_text().replace("0.1", "0.2"))
    assert Run(tmp_path / "r").notes == [EDITED.format("config")]


@pytest.mark.slow
def test_the_documented_script_under_torchrun(tmp_path):
    """Phases of both ranks arrive, and the weights are restored: training continues with a finite loss."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    example = ROOT / "docs/examples/own_script.py"
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, example, tmp_path / "own"], env=env, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    written = rows(tmp_path / "own")
    assert all(list(row) == KEYS for row in written)
    timed = sorted((r["rank"], r["cycle"], r["phase"]) for r in written if r["metric"] == "seconds")
    assert timed == [(rank, i, p) for rank in range(2) for i in range(3) for p in ("offload", "reload", "train")]
    assert len([r for r in written if r["metric"] == "loss" and math.isfinite(r["value"])]) == 6
    assert {r["value"] for r in written if r["metric"] == "groups"} == {1}
    assert run_json(tmp_path / "own")["status"] == "finished"
    assert run_json(tmp_path / "own")["config"] == {"ranks": 2, "cycles": 3}


def test_every_rank_refuses_a_folder_of_another_launch(tmp_path, monkeypatch):
    """Otherwise rank 1 would append to a finished run while rank 0 refuses."""
    monkeypatch.setenv("MASTER_PORT", "1234")
    Recorder(tmp_path, rank=0, world_size=2).close()
    Recorder(tmp_path, rank=1, world_size=2).close()  # of the same launch, but later
    before = (tmp_path / "run.json").read_bytes()
    monkeypatch.setenv("MASTER_PORT", "4321")
    for rank in range(2):
        with pytest.raises(BadInput, match="already holds a run"):
            Recorder(tmp_path, rank=rank, world_size=2)
    monkeypatch.setenv("MASTER_PORT", "1234")  # torchrun's default port for every launch
    old = json.loads(before) | {"started": "2020-01-01T00:00:00+00:00", "finished": "2020-01-01T01:00:00+00:00"}
    (tmp_path / "run.json").write_text(json.dumps(old))
    with pytest.raises(BadInput, match="already holds a run"):
        Recorder(tmp_path, rank=1, world_size=2)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    (tmp_path / "run.json").write_text(json.dumps(old | {"launch": "none 1234", "finished": None}))  # it was killed
    with pytest.raises(BadInput, match="already holds a run"):
        Recorder(tmp_path, rank=1, world_size=2)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    Recorder(tmp_path, rank=1, world_size=2).close()


@pytest.mark.slow
def test_ranks_of_torchrun_accept_their_own_folder_and_refuse_it_the_next_time(tmp_path):
    (tmp_path / "job.py").write_text(
        "import os, time\nfrom kit.measure import Recorder\n"
        "time.sleep(float(os.environ['RANK']))  # rank 0 may be done before another begins\n"
        "try:\n    Recorder('run').close()\n    print('recorded')\nexcept ValueError as error:\n    print(error)\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "job.py"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    for words in ("recorded", "already holds a run"):
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
        assert done.stdout.count(words) == 2, done.stdout + done.stderr


@pytest.mark.parametrize("given", [{"rank": 2, "world_size": 2}, {"rank": -1}, {"rank": "1", "world_size": 2}])
def test_a_rank_that_cannot_be_is_refused(tmp_path, given):
    with pytest.raises(BadInput, match="rank is"):
        Recorder(tmp_path / "r", **given)


class Wandb:
    """The part of a W&B run that a sink needs."""

    def __init__(self):
        self.seen = []

    def log(self, values, step):
        self.seen.append((step, values))


class Board:
    """The part of TensorBoard's SummaryWriter that a sink needs."""

    def __init__(self):
        self.seen = {}

    def add_scalar(self, name, value, step):
        self.seen[name, step] = value


def test_sinks_get_every_number_with_its_cycle(tmp_path):
    wandb, board = Wandb(), Board()
    with Recorder(tmp_path / "r", sinks=[wandb, board]) as rec:
        with rec.phase("train", cycle=3):
            rec.record("loss", torch.tensor(0.5), "nat")
        rec.event("saved", cycle=4)
    assert wandb.seen[0] == (3, {"train/loss": 0.5})
    assert {"train/seconds", "train/rss"} < set(wandb.seen[1][1])
    assert len(wandb.seen) == 2  # an event has no value to log
    assert board.seen["train/loss", 3] == 0.5
    assert board.seen["train/fds", 3] > 0


@pytest.mark.filterwarnings("error")
def test_a_sink_that_raises_does_not_end_the_training(tmp_path):
    class Broken(Wandb):
        def log(self, values, step):
            raise ConnectionError("no network")

    wandb = Wandb()
    rec = Recorder(tmp_path / "r", sinks=[Broken(), wandb])
    with pytest.warns(RuntimeWarning, match="Broken raised .*no network.* gets no more numbers; training goes on"):
        rec.record("loss", 1)
    rec.record("loss", 2)  # a second warning would be an error here
    rec.close()
    assert [values for _, values in wandb.seen] == [{"run/loss": 1.0}, {"run/loss": 2.0}]
    with pytest.raises(BadInput, match=r"has neither log\(dict, step=\) nor add_scalar"):
        Recorder(tmp_path / "other", sinks=[object()])


LEAKS = """
import os, tempfile, threading
kept = []
with Recorder(folder, lab="mine") as rec:
    for cycle in range(6):
        with rec.phase("clean", cycle=cycle, observe=True):
            threading.Thread(target=int).start()
        with rec.phase("leaky", cycle=cycle, observe=True):
            kept.append(os.memfd_create("x"))
            kept.append(bytearray(os.urandom(4 * 2**20)))
        with rec.phase("unseen", cycle=cycle):
            kept.append(open("/dev/null"))
"""


def test_an_observed_phase_is_judged_without_a_lab(tmp_path):
    script(tmp_path / "r", LEAKS)
    run = kit.load(tmp_path / "r")
    assert run.config["observed"] is True
    metrics = set(run.frame().query("phase == 'leaky'")["metric"])
    assert {"memfds", "memfds_before", "shared_maps", "children", "shm_rss", "observers_seconds"} < metrics
    rows = {row.check: row for row in run.verdict()}
    assert set(rows) == {
        *("nothing_piles_up", "nothing_piles_up/clean", "nothing_piles_up/leaky"),
        *("memory_slope", "memory_slope/clean", "memory_slope/leaky"),
    }
    assert rows["nothing_piles_up/leaky"].passed is False
    assert "memfds: 3 after cycle 2, 5 after cycles 4 and 5 (+2; rank 0, cycle 5)" in rows["nothing_piles_up/leaky"].why
    assert rows["memory_slope/leaky"].measured == pytest.approx(4, abs=0.5)


def test_an_observed_phase_that_keeps_nothing_passes(tmp_path):
    body = "rec = Recorder(folder)\nfor i in range(6):\n    with rec.phase('p', cycle=i, observe=True): open('/dev/null').close()"
    script(tmp_path / "r", body)
    assert [row.passed for row in kit.load(tmp_path / "r").verdict()] == [True] * 4
    script(tmp_path / "plain", body.replace(", observe=True", ""))
    assert kit.load(tmp_path / "plain").verdict() == ()  # observers were not requested


def test_own_numbers_are_shown_reported_and_drawn(tmp_path, capsys):
    with Recorder(tmp_path / "r", rank=0, world_size=1) as rec:
        for cycle in range(4):
            with rec.phase("train", cycle=cycle, observe=True):
                rec.record("loss", 4.0 - cycle, "nat")
                rec.record("tokens", 100)
                rec.record("tokens", 50)
    assert cli.main(["show", str(tmp_path / "r")]) == 0
    shown = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["phase", "metric", "n", "first", "last", "min", "max"] in shown
    assert ["train", "loss", "4", "4", "nat", "1", "nat", "1", "nat", "4", "nat"] in shown
    assert [line[1] for line in shown if line[:1] == ["train"]][1:] == ["loss", "tokens"]  # no phase metrics
    run = kit.load(tmp_path / "r")
    tokens, loss = run.plot("numbers").axes
    assert (loss.get_title("left"), loss.get_xlabel()) == ("loss [nat]", "cycle")
    assert loss.lines[0].get_ydata().tolist() == [4, 3, 2, 1]
    assert (tokens.get_title("left"), tokens.get_xlabel()) == ("tokens", "record")
    assert len(tokens.lines[0].get_ydata()) == 8
    assert [row[1][0] for row in chapter_tables(read(run))[1]["rows"]] == ["loss", "tokens"]


ACTOR = "import sys; from docs.examples.ray_actors import Trainer; t = Trainer(sys.argv[1], int(sys.argv[2]), 2); t.train(6); t.close()"


def recorded_by_actors(folder):
    run = kit.load(folder)
    assert (run.status, run.config) == ("finished", {"ranks": 2, "observed": True})
    losses = run.frame().query("metric == 'loss'")
    assert sorted(zip(losses["rank"], losses["cycle"], strict=True)) == [(r, c) for r in range(2) for c in range(6)]
    assert "nothing_piles_up/train" in {row.check for row in run.verdict()}


@pytest.mark.slow
def test_the_actors_of_the_documented_example_make_one_run(tmp_path):
    """Each actor runs in its own process without RANK, as in Ray, and they begin at different times."""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", ACTOR, str(tmp_path / "r")]
    actors = [subprocess.Popen([*command, str(rank)], env=env, cwd=ROOT) for rank in range(2)]
    assert [actor.wait() for actor in actors] == [0, 0]
    recorded_by_actors(tmp_path / "r")


@pytest.mark.slow
def test_the_documented_example_under_ray(tmp_path):
    pytest.importorskip("ray", reason="needs the package ray")
    command = [sys.executable, str(ROOT / "docs/examples/ray_actors.py"), str(tmp_path / "r")]
    subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    recorded_by_actors(tmp_path / "r")


def test_the_id_of_a_run_is_made_of_letters_digits_and_signs(tmp_path: Path) -> None:
    with Recorder(tmp_path / r"my \run{2}") as rec:
        rec.record("loss", 1.0)
    run = Run(tmp_path / r"my \run{2}")
    assert run.id == "my-run-2-"
    assert run.frame()["run"].tolist() == ["my-run-2-"]
    with pytest.raises(BadInput, match="'' is not a path"):
        Recorder("")
