"""The controller with real ranks: every button, failures with their culprits, Stop while ranks hang, and nothing left behind."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import kit
from kit.errors import BadInput, KitError
from kit.labs.definition import Definition, Role, Step
from kit.labs.discover import find
from kit.labs.lab import Lab, Stepped
from kit.results import read_verdict
from kit.view.model import PanelController, PanelModel
from kit.view.progress import CallWatch, EndedBy
from tests.holdings import holdings, wait_for

SOURCE = """
import ctypes, os, signal, sys, time
from dataclasses import dataclass
from typing import Annotated, Literal
import torch.distributed as dist
from kit.labs.definition import Definition, Step
from kit.labs.definition import LabConfig, Option

@dataclass(frozen=True, kw_only=True, slots=True)
class Config(LabConfig):
    do: Annotated[
        Literal["nothing", "raise", "kill", "sleep", "hard", "chatter", "begin"], Option("what rank 1 does in the second phase")
    ] = "nothing"

class Phases:
    def __init__(self, ctx):
        self.ctx = ctx
        if ctx.config.do == "begin":
            time.sleep(600)
    def first(self, cycle):
        print("first of cycle", cycle, flush=True)
    def second(self, cycle):
        do = self.ctx.config.do
        if self.ctx.rank == 1:
            if do == "raise":
                raise RuntimeError("rank 1 is told to raise")
            if do == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if do == "sleep":
                time.sleep(600)
            if do == "hard":
                ctypes.PyDLL(None).sleep(600)  # keeps the interpreter's lock: no interrupt is heard
            while do == "chatter":
                print("still here", flush=True)
        if do != "nothing":
            dist.barrier()

def seen(frame, config):
    from kit.results import Measured, select
    return Measured(float(select(frame, metric="seconds", phase="second")["cycle"].max()))

def __getattr__(name):
    if name == "RULES":
        from kit.results import Rule
        return [Rule("cycles_seen", "?", seen, limit=2)]
    raise AttributeError(name)

LAB = Definition(
    name="panelled", summary="a lab of a test", config=Config,
    plan=lambda config: [Step(c, phase) for c in (1, 2) for phase in ("first", "second")],
    phases="panelled_lab:Phases", rules="panelled_lab:RULES",
)
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Definition]:
    """A lab made for these tests; its setting decides how its second phase breaks."""
    monkeypatch.setenv("KIT_RUNS", str(tmp_path / "runs"))
    (tmp_path / "panelled_lab.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    import panelled_lab

    yield panelled_lab.LAB
    del sys.modules["panelled_lab"]


Make = Callable[..., tuple[PanelModel, PanelController]]


@pytest.fixture
def made(own: Definition, nothing_left: None) -> Iterator[Make]:
    """Make models and controllers of this test lab or of another; close them at the end."""
    controllers: list[PanelController] = []

    def make(definition: Definition = own, **config: object) -> tuple[PanelModel, PanelController]:
        model = PanelModel(definition, config)
        controllers.append(PanelController(model))
        return model, controllers[-1]

    yield make
    for controller in controllers:
        controller.close()


def until(condition: Callable[[], object]) -> None:
    assert wait_for(condition, 20.0)


def hanging(model: PanelModel) -> bool:
    """Whether the second phase is running."""
    return any(row.phase == "second" and row.status == "running" for row in model.phases)


@pytest.mark.slow
def test_every_button_of_the_smoke_lab(made: Make) -> None:
    smoke = find("smoke")
    model, controller = made(smoke)
    whole, short = (len(smoke.plan(smoke.config(cycles=cycles))) for cycles in (model.values["cycles"], 1))
    states: list[str] = []
    model.observe(lambda change: states.append(change["new"]), "state")

    controller.start()
    assert (model.state, model.can) == ("starting", {"stop"})
    controller.wait()
    assert (model.state, model.failure) == ("ready", None)
    assert model.can == {"step", "run", "stop", "restart"}
    assert "next is baseline" in model.notice

    controller.step()
    controller.wait()
    first, second, *_ = model.phases
    assert (first.status, first.ranks, second.status) == ("done", ("done", "done"), "next")
    assert all(value is not None and value > 0 for value in first.seconds)
    assert (model.progress.done, model.progress.total) == (1, whole)
    assert set(model.run.frame()["phase"]) == {"run", "baseline"}

    grown = model.revision
    controller.run_all()
    controller.wait()
    assert {row.status for row in model.phases} == {"done"}
    assert model.progress.left == 0
    assert model.revision > grown
    assert (model.state, model.run.status) == ("finished", "finished")
    assert model.verdict == read_verdict(model.run.dir / "verdict.json")
    assert model.verdict.passed
    assert states == ["starting", "ready", "running", "ready", "running", "finished"]

    model.move("memory_drift", -1000)
    assert [row.check for row in model.verdict.failed] == ["memory_drift"]

    before = model.run.dir
    model.set("cycles", 1)
    model.set_fault("leaked-group")
    assert len(model.phases) == whole  # finished phases stay visible until the next start
    controller.restart()
    controller.wait()
    assert (model.state, len(model.phases)) == ("ready", short)
    assert model.run.dir != before
    assert (model.run.fault, model.run.config["cycles"]) == ("leaked-group", 1)
    controller.run_all()
    controller.wait()
    assert "groups_return_to_baseline" in [row.check for row in model.verdict.failed]
    assert kit.load(before).status == "finished"


def test_a_button_that_makes_no_sense_says_so_and_does_nothing(made: Make) -> None:
    model, controller = made(find("smoke"))
    controller.stop()
    assert model.remark == "stop is not possible now: the lab is idle"
    model.set("cycles", 0)
    controller.run_all()
    assert model.remark.startswith("run is not possible now: cycles must be a whole number")
    assert model.state == "idle"


def test_a_rank_that_raises_is_red_and_who_waited_is_not(made: Make) -> None:
    model, controller = made(do="raise")
    controller.run_all()
    controller.wait()
    assert model.state == "failed"
    assert (model.failure.kind, model.failure.ranks, model.failure.phase) == ("raised", (1,), "second")
    assert "RuntimeError: rank 1 is told to raise" in model.failure.detail
    assert [row.status for row in model.phases] == ["done", "failed", "to do", "to do"]
    assert model.phases[1].ranks[1] == "failed"
    assert model.phases[1].ranks[0] != "failed"
    assert set(model.run.frame()["phase"]) >= {"first", "second"}
    assert model.can == {"start", "step", "run", "restart"}
    model.set("do", "nothing")
    controller.step()  # starts fresh ranks
    controller.wait()
    assert (model.state, model.failure) == ("ready", None)
    assert [row.status for row in model.phases] == ["done", "next", "to do", "to do"]


@pytest.mark.slow
def test_a_rank_that_dies(made: Make) -> None:
    model, controller = made(do="kill")
    controller.run_all()
    controller.wait()
    assert (model.failure.kind, model.failure.ranks) == ("died", (1,))
    assert "SIGKILL" in model.notice
    assert model.run.status == "failed"


@pytest.mark.slow
def test_a_deadline_blames_the_rank_that_the_other_waited_for(made: Make) -> None:
    model, controller = made(do="sleep", timeout_s=2.0)
    controller.run_all()
    controller.wait()
    assert (model.failure.kind, model.failure.ranks) == ("timeout", (1,))
    assert model.phases[1].ranks == ("waiting", "failed")
    assert "rank 1:" in model.failure.detail


@pytest.mark.parametrize("do", ["hard", *(pytest.param(do, marks=pytest.mark.slow) for do in ("sleep", "chatter"))])
def test_stop_ends_ranks_that_hang_and_keeps_what_was_measured(made: Make, do: str) -> None:
    model, controller = made(do=do)
    controller.run_all()
    until(lambda: hanging(model))
    assert model.phases[1].ranks[1] == "running"
    assert model.can == {"stop"}
    controller.stop()
    assert model.state == "stopping"
    controller.wait()
    assert (model.state, model.failure.kind, model.failure.ranks) == ("stopped", "stopped", ())
    assert model.notice == "stopped in phase 'second': 1 of 4 phases were done; their measurements are kept"
    assert model.failure.phase == "second"
    assert "rank 1:" in model.failure.detail
    assert "failed" not in model.phases[1].ranks
    assert model.phases[1].ranks[1] == "waiting"  # it reported that it was stopped, so it is not done
    assert (model.run.status, (model.run.error or "").startswith("stopped: ")) == ("stopped", True)
    assert set(model.run.frame()["phase"]) >= {"first"}
    assert holdings(os.getpid())["processes"] == []


def halves(config: Any) -> list[Role]:
    """Rank 0 in one World, all other ranks in another."""
    return [Role(name="one", ranks=(0,)), Role(name="other", ranks=tuple(range(1, config.ranks)), world=1)]


def test_stop_ends_every_world(made: Make, own: Definition) -> None:
    model, controller = made(dataclasses.replace(own, roles=halves), do="sleep")
    controller.run_all()
    until(lambda: hanging(model))
    controller.stop()
    controller.wait()
    assert (model.state, model.failure.kind) == ("stopped", "stopped")
    assert holdings(os.getpid())["processes"] == []


@pytest.mark.slow
def test_stop_while_ranks_are_made_ready(made: Make) -> None:
    model, controller = made(do="begin")
    controller.start()
    until(lambda: controller._watch.phase == "begin")
    controller.stop()
    controller.wait()
    assert (model.state, model.failure.kind) == ("stopped", "stopped")
    assert {row.status for row in model.phases[1:]} == {"to do"}
    assert holdings(os.getpid())["processes"] == []


def test_stop_while_ranks_are_started(made: Make, own: Definition, tmp_path: Path) -> None:
    (tmp_path / "slow_to_load.py").write_text("import pathlib, time; pathlib.Path('loading').touch(); time.sleep(600)")
    model, controller = made(dataclasses.replace(own, preload=("slow_to_load",)))
    controller.start()
    until((tmp_path / "loading").exists)
    controller.stop()
    controller.wait()
    assert (model.state, model.failure.kind) == ("stopped", "stopped")
    assert holdings(os.getpid())["processes"] == []


@pytest.mark.slow
def test_stop_between_two_steps(made: Make) -> None:
    model, controller = made()
    controller.step()
    controller.wait()
    controller.stop()
    controller.wait()
    assert (model.state, model.notice) == (
        "stopped",
        "stopped: 1 of 4 phases were done; their measurements are kept",
    )
    assert "1 of 4 phases" in str(model.run.error)
    controller.restart()
    controller.wait()
    assert model.state == "ready"


def test_a_refused_start_leaves_the_run_before_as_it_was_and_nothing_of_it_beside_the_error(
    made: Make, tmp_path: Path
) -> None:
    smoke = find("smoke")
    model, controller = made(smoke, cycles=1)
    controller.run_all()
    controller.wait()
    before, planned = model.run.dir, len(model.phases)
    assert {row.status for row in model.phases} == {"done"}
    model.set("implementation", "nowhere:Thing")
    controller.start()
    assert {row.status for row in model.phases} == {"next", "to do"}
    controller.wait()
    assert (model.state, model.problems, model.failure.kind) == ("idle", {}, "refused")
    assert "cannot be loaded" in model.failure.message
    assert "start" in model.can
    assert [row.status for row in model.phases] == ["next", *["to do"] * (planned - 1)]
    assert (model.progress.done, model.progress.elapsed) == (0, 0)
    assert (model.run.dir, model.verdict.passed) == (before, True)
    (tmp_path / "late.py").write_text("def thing(ctx): raise ImportError('only ranks know')")
    model.set("implementation", "late:thing")
    controller.start()
    assert model.failure is None
    controller.wait()
    assert (model.state, model.live) == ("failed", True)  # its ranks did not start, and its own run is shown
    assert model.run.dir != before


def test_bad_input_in_a_phase_breaks_the_run(made: Make, own: Definition, tmp_path: Path) -> None:
    """An own controller may ask for what the kit refuses, when ranks live and rows exist."""
    (tmp_path / "asks_late.py").write_text(
        "from kit.errors import BadInput\ndef wrongly(drive):\n    drive.record('asked', 1, '1')\n    raise BadInput('no such port')"
    )
    asks = dataclasses.replace(find("share"), plan=lambda _: [Step(1, "work", driver="asks_late:wrongly")])
    model, controller = made(asks, simulated=True)
    controller.run_all()
    controller.wait()
    assert (model.state, model.failure.kind, model.live) == ("failed", "error", True)
    assert model.failure.message == "no such port"
    with pytest.raises(KitError, match="no such port") as broke, Lab(asks, {"simulated": True}) as lab:
        lab.run()
    assert not isinstance(broke.value, BadInput)  # `kit run` ends with 3, not 2


def test_a_lab_is_taken_over_as_it_stands(own: Definition, nothing_left: None) -> None:
    with Lab(own, {"ranks": 2}, tolerances={"cycles_seen": 1}) as lab:
        lab.step()
        model = PanelModel(own, lab.given, tolerances=lab.tolerances)
        controller = PanelController(model, lab=lab)
        assert (model.state, model.run.dir) == ("ready", lab.dir)
        assert [row.status for row in model.phases] == ["done", "next", "to do", "to do"]
        assert all(value is not None for value in model.phases[0].seconds)
        pids = lab.world.pids
        controller.run_all()
        controller.wait()
        assert model.state == "finished"
        assert not model.verdict.passed  # with the tolerance that the lab was made with
        assert (lab.world.pids, lab.world.state) == (pids, "idle")  # its owner can still use them
        controller.close()
    assert lab.run() is lab.judged


def test_what_is_done_by_hand_meanwhile_is_seen_at_once(own: Definition, nothing_left: None) -> None:
    with Lab(own, {}) as lab:
        model = PanelModel(own, lab.given)
        controller = PanelController(model, lab=lab)
        lab.step()
        assert (model.state, model.run.dir) == ("ready", lab.dir)
        assert [row.status for row in model.phases] == ["done", "next", "to do", "to do"]
        controller.step()
        controller.wait()
        assert (model.state, [row.status for row in model.phases]) == ("ready", ["done", "done", "next", "to do"])
        run = lab.run()
        assert (model.state, model.run.dir, model.verdict.passed) == ("finished", run.dir, True)
        assert {row.status for row in model.phases} == {"done"}
        controller.close()


def test_a_step_by_hand_that_breaks_ends_the_run_in_the_panel(own: Definition, nothing_left: None) -> None:
    with Lab(own, {"do": "raise"}) as lab:
        model = PanelModel(own, lab.given)
        controller = PanelController(model, lab=lab)
        with pytest.raises(KitError):
            lab.run()
        assert model.state == "failed"
        assert "failed" in [row.status for row in model.phases]
        controller.close()


def test_a_lab_that_has_not_started_is_started_and_not_replaced(own: Definition, nothing_left: None) -> None:
    with Lab(own, {}) as lab:
        model = PanelModel(own, lab.given)
        controller = PanelController(model, lab=lab)
        assert (model.state, model.can) == ("idle", {"start", "step", "run"})
        controller.step()
        controller.wait()
        assert model.run.dir == lab.dir
        controller.close()


def test_lab_panel_needs_a_room_that_makes_panels(own: Definition) -> None:
    with Lab(own, {}) as lab, pytest.raises(BadInput, match="made without a panel"):
        lab.panel()


@pytest.mark.slow
def test_runs_of_a_panel_with_a_folder_lie_side_by_side(own: Definition, tmp_path: Path, nothing_left: None) -> None:
    model = PanelModel(own)
    controller = PanelController(model, out=tmp_path / "mine")
    for name in ("mine", "mine-2"):
        controller.restart() if model.state == "ready" else controller.start()
        controller.wait()
        assert model.run.dir == tmp_path / name
    controller.close()


@pytest.mark.slow
def test_in_a_kernel_the_model_changes_in_the_loops_thread_and_the_loop_stays_free(
    own: Definition, nothing_left: None
) -> None:
    threads: set[int] = set()

    async def cell() -> None:
        model = PanelModel(own, {"do": "sleep"})
        model.observe(lambda _: threads.add(threading.get_ident()))
        controller = PanelController(model)
        controller.step()
        controller.wait()  # blocks the event loop, but the model is still updated
        assert model.state == "ready"
        controller.run_all()
        while not hanging(model):
            await asyncio.sleep(0.01)
        for _ in range(20):  # the event loop runs while a rank hangs
            await asyncio.sleep(0.01)
        assert hanging(model)
        controller.stop()
        while model.state != "stopped":
            await asyncio.sleep(0.01)
        controller.close()

    asyncio.run(cell())
    assert threads == {threading.get_ident()}


@pytest.mark.slow
def test_what_ranks_print_is_in_the_log_and_a_view_that_fails_stops_nothing(
    made: Make, caplog: pytest.LogCaptureFixture
) -> None:
    model, controller = made()

    def fail(_: object) -> None:
        raise ZeroDivisionError("of this test")

    model.observe(fail, ["progress"])
    controller.run_all()
    controller.wait()
    assert model.state == "finished"
    assert sorted(model.log) == [(rank, f"first of cycle {cycle}") for rank in (0, 1) for cycle in (1, 2)]
    assert model.verdict[0].measured == 2
    assert "a view of the panel failed" in caplog.text
    model.unobserve(fail, ["progress"])


def test_ticks_that_come_fast_are_reported_seldom(own: Definition) -> None:
    reported: list[None] = []
    watch = CallWatch(threading.Event(), lambda: reported.append(None), every_s=3600)
    with Lab(own, {}) as lab:
        watch.take(lab)
        for _ in range(100):
            watch.tick(())
            watch.output(0, "a line\nand another")
        phases, progress, log = watch.seen()
    assert len(reported) <= 1
    assert len(log) == 200
    assert (len(phases), progress.done, progress.total, progress.left) == (4, 0, 4, 0)


def test_time_left_is_known_from_the_same_phases_of_earlier_cycles(made: Make) -> None:
    _, controller = made()
    left: list[float | None] = []
    controller.start()
    controller.wait()
    watch = controller._watch
    watch.begin(all_of_it=True)
    left.append(watch.seen()[1].left)
    controller.step()
    controller.wait()
    watch.begin(all_of_it=True)
    left.append(watch.seen()[1].left)
    took = watch._took["first"][0]
    assert left == [None, pytest.approx(3 * took)]  # phases not seen before are assumed to take as long as known ones


def test_ranks_without_work_in_a_phase_are_neither_running_nor_done(own: Definition) -> None:
    plan = [Step(0, "first", ("one",)), Step(1, "second")]
    watch = CallWatch(threading.Event(), lambda: None, every_s=3600)
    with Lab(dataclasses.replace(own, roles=halves, plan=lambda _: plan), {"ranks": 3}) as lab:
        watch.take(lab)
        assert [phase.ranks for phase in watch.seen()[0]] == [("waiting", "absent", "absent"), ("waiting",) * 3]
        watch.started("first", [0])
        assert watch.seen()[0][0].ranks == ("running", "absent", "absent")
        assert not watch.grew
        watch.recorded(1)
        assert watch.grew
        watch.stepped(Stepped(0, "first", [], done=1, planned=2), 0.1)
        assert watch.seen()[0][0].ranks == ("done", "absent", "absent")


def test_who_is_to_blame_is_marked_and_nobody_else(own: Definition) -> None:
    watch = CallWatch(threading.Event(), lambda: None, every_s=3600)
    with Lab(own, {"ranks": 3}) as lab:
        watch.take(lab)
        watch.started("first", [0, 1, 2])
        watch.tick([2])
        assert watch.seen()[0][0].ranks == ("running", "running", "done")
        watch.failed(EndedBy("timeout", "", (1,), "first", ""))
    assert watch.seen()[0][0].ranks == ("waiting", "failed", "done")


@pytest.mark.slow
def test_a_kernel_that_is_killed_leaves_no_ranks(own: Definition, tmp_path: Path) -> None:
    code = (
        "import os, panelled_lab\n"
        "from kit.view.model import PanelController, PanelModel\n"
        "model = PanelModel(panelled_lab.LAB, {'do': 'hard'})\ncontroller = PanelController(model)\ncontroller.run_all()\n"
        "while not any(row.phase == 'second' and row.status == 'running' for row in model.phases): pass\n"
        "print(os.getpid(), len(controller._lab.world.pids), flush=True)\nos.kill(os.getpid(), 9)"
    )
    path = os.pathsep.join([str(tmp_path), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path}
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    owner, ranks = map(int, done.stdout.split())
    assert ranks == 2
    until(lambda: holdings(owner)["processes"] == [] and holdings(owner)["folders"] == [])
    model = PanelModel(own)  # as if the notebook were opened again
    assert (model.run.status, set(model.run.frame()["phase"])) == ("interrupted", {"run", "first"})
