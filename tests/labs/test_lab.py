"""A lab that is stepped by hand, run at once, broken and closed."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest

import kit
from kit.errors import BadInput, KitError, RankDied, RankError, RankTimeout
from kit.labs.definition import Definition, Role, Step
from kit.labs.lab import Lab
from kit.results import Run, read_verdict
from kit.world import World
from kit.world.world import Worlds

Make = Callable[..., Lab]


def info(lab: Lab) -> dict[str, object]:
    return json.loads((lab.dir / "run.json").read_text())


def test_steps_by_hand(made: Make) -> None:
    lab = made(words=["a", "b"]).start()
    assert [row.status for row in lab.phases] == ["next", "to do", "to do"]
    assert lab.world.ranks == 2
    shown = lab.step()
    assert (shown.cycle, shown.phase) == (0, "first")
    assert {r.metric for r in shown.rows} >= {"seconds", "groups", "groups_before", "fds", "rss", "words"}
    assert {(r.rank, r.value) for r in shown.rows if r.metric == "words"} == {(0, 2.0), (1, 2.0)}
    assert "first (phase 1 of 3)" in repr(shown)
    assert "rank 1" in shown._repr_html_()
    assert [row.status for row in lab.phases] == ["done", "next", "to do"]
    # Measurements are on disk at once.
    assert len(Run(lab.dir).frame().query("metric == 'seconds'")) == 2
    run = lab.run()
    assert run.status == "finished"
    assert read_verdict(lab.dir / "verdict.json") == run.verdict()
    assert [row.status for row in lab.phases] == ["done"] * 3
    assert lab.run() is run
    with pytest.raises(KitError, match="judged"):
        lab.step()


@pytest.mark.slow
def test_by_hand_and_at_once_measure_the_same(made: Make) -> None:
    by_hand, at_once = made(), made()
    for _ in by_hand.phases:
        by_hand.step()
    frames = [lab.run().frame() for lab in (by_hand, at_once)]
    keys = ["cycle", "phase", "rank", "metric", "unit"]
    one, other = (frame[keys].sort_values(keys).to_dict("records") for frame in frames)
    assert one == other


class Onlooker:
    """Remembers the number of calls to expect, and the phases that started."""

    def __init__(self, calls: int) -> None:
        self.calls = calls
        self.seen: list[str] = []

    def started(self, phase: str, ranks: object) -> None:
        self.seen.append(phase)

    def output(self, rank: int, text: str) -> None: ...
    def tick(self, answered: object) -> None: ...
    def ended(self) -> None: ...


class Counting(Onlooker):
    """Keeps each record count that it gets."""

    def __init__(self, calls: int) -> None:
        super().__init__(calls)
        self.counts: list[int] = []

    def recorded(self, count: int) -> None:
        self.counts.append(count)


@pytest.mark.slow
def test_each_step_by_hand_is_watched_by_itself_and_a_run_as_a_whole(
    own: Definition, runs: Path, nothing_left: None
) -> None:
    onlookers: list[Onlooker] = []

    def observe(calls: int) -> Onlooker:
        onlookers.append(Onlooker(calls))
        return onlookers[-1]

    with Lab(own, {}, observe=observe) as lab:
        lab.step()
        lab.run()
    assert [(one.calls, one.seen) for one in onlookers] == [(2, ["begin", "first"]), (3, ["second", "second", "end"])]


@pytest.mark.slow
def test_the_run_tells_where_it_comes_from(made: Make) -> None:
    lab = made()
    run = lab.run()
    assert run.config["ranks"] == 2
    assert run.provenance["rank0"]["versions"]["torch"]
    assert run.provenance["world"]["device"] == lab.world.device
    boundary = run.frame().query("phase == 'run'")
    assert sorted(set(boundary["metric"])) == ["pss", "pss_before"]
    assert {path.name for path in (lab.dir / "logs").iterdir()} >= {"rank0.log", "rank1.log"}


def test_the_ranks_settle_the_device_and_its_dtype(
    own: Definition, runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nothing_left: None
) -> None:
    """There is a driver, and a torch that cannot use it."""
    driver = tmp_path / "version"
    driver.write_text("NVRM version: NVIDIA UNIX Open Kernel Module  550.54.14")
    monkeypatch.setattr("kit.machine.GPU_DRIVERS", (driver,))
    import own_lab

    checked: list[str] = []
    typed = dataclasses.replace(own, config=own_lab.Typed, fits=lambda config: checked.append(config.device))
    with Lab(typed, {}) as lab:
        assert (lab.config.device, lab.config.dtype) == ("auto", "bfloat16")
        run = lab.run()
    assert (run.config["device"], run.config["dtype"]) == ("cpu", "float32")
    assert run.frame().query("metric == 'dtype'")["text"].unique().tolist() == ["float32"]
    assert checked == ["auto", "cpu"]
    assert run.notes == [
        f"the ranks ran on the CPU although this box has the GPU driver 550.54.14: {run.provenance['world']['why']}"
    ]


def test_a_phase_that_raises_is_recorded_and_ends_the_run(made: Make) -> None:
    lab = made(fault="breaks")
    with pytest.raises(RankError, match="told to raise") as caught:
        lab.run()
    assert (caught.value.rank, caught.value.phase) == (1, "second")
    run = Run(lab.dir)
    assert (run.status, run.fault) == ("failed", "breaks")
    assert "told to raise" in (run.error or "")
    second = run.frame().query("phase == 'second' and rank == 1").set_index("metric")["value"]
    assert second["seen"] == 1
    assert second["failed"] == 1
    assert second["seconds"] > 0
    assert "failed" not in set(run.frame().query("rank == 0")["metric"])
    assert "Traceback" in (lab.dir / "logs" / "error.txt").read_text()
    row = read_verdict(lab.dir / "verdict.json")[0]  # judged as far as the records go
    assert (row.passed, row.measured) == (True, 1)
    assert [row.status for row in lab.phases] == ["done", "failed", "to do"]
    with pytest.raises(KitError, match="has failed"):
        lab.step()
    with pytest.raises(KitError, match="has failed"):
        lab.run()


def test_a_rank_that_dies_leaves_what_was_measured(made: Make) -> None:
    lab = made(do="kill")
    with pytest.raises(RankDied) as caught:
        lab.run()
    assert (caught.value.rank, caught.value.signal, caught.value.phase) == (1, "SIGKILL", "second")
    run = Run(lab.dir)
    assert run.partial
    assert "SIGKILL" in (run.error or "")
    assert set(run.frame()["phase"]) >= {"run", "first"}
    assert list(run.frame().query("phase == 'second' and rank == 1")["metric"]) == ["failed"]
    row = read_verdict(lab.dir / "verdict.json")[0]
    assert row.passed in {None, True}  # as far as the records go: rank 0 may have finished its phase


@pytest.mark.slow
def test_a_deadline_names_the_culprit(made: Make) -> None:
    lab = made(do="hang", timeout_s=2.0)
    with pytest.raises(RankTimeout) as caught:
        lab.run()
    assert caught.value.culprits == (1,)
    assert "rank" in str(info(lab)["error"])


def test_closed_before_its_end(made: Make) -> None:
    lab = made()
    lab.step()
    lab.close()
    lab.close()
    assert info(lab)["status"] == "failed"
    assert "1 of 3 phases" in str(info(lab)["error"])
    with pytest.raises(KitError):
        lab.step()


@pytest.mark.slow
def test_the_context_manager_ends_the_ranks(made: Make) -> None:
    with made() as lab:
        lab.run()
        assert lab.world.state == "idle"
    assert lab.world.state == "closed"
    assert info(lab)["status"] == "finished"


@pytest.mark.slow
def test_a_world_that_is_given_is_used_and_left_alive(own: Definition, runs: Path, nothing_left: None) -> None:
    with World(3, device="cpu") as world:
        pids = world.pids
        for _ in range(2):
            with Lab(own, {}, world=world) as lab:
                run = lab.run()
            assert (run.status, run.config["ranks"]) == ("finished", 3)
            assert set(run.frame().query("phase == 'second'")["rank"]) == {0, 1, 2}
        assert lab.world is world
        left = "[one for one in __import__('gc').get_objects() if type(one).__name__ == 'Phases']"
        assert world.eval(f"len({left})") == [0, 0, 0]  # the next lab gets the memory
        with pytest.raises(RankError, match="told to raise"):
            Lab(own, {}, fault="breaks", world=world).run()
        assert (world.state, world.pids) == ("idle", pids)
        with pytest.raises(BadInput, match="ranks=2, but the given World has 3"):
            Lab(own, {"ranks": 2}, world=world)


class Told:
    """A World whose ranks are on these machines; `calls` is what they were told."""

    device = "cpu"

    def __init__(self, nodes: list[int]) -> None:
        self.nodes = nodes
        self.addresses = [f"10.0.0.{1 + node}" for node in nodes]
        self.calls: list[tuple[str, Any, dict[str, Any]]] = []

    def status(self) -> list[dict[str, Any]]:
        return [{"device": "cpu", "node": node} for node in self.nodes]

    def call(self, target: str, *, timeout_s: float, ranks: Any = None, args: Any = None, **given: Any) -> list[Any]:
        assert timeout_s > 0
        self.calls.append((target.partition(":")[2], ranks, {**(args or {}), **given}))
        return [
            {"ports": {"sync": 7} if number == 0 and len({*self.nodes}) > 1 else {}}
            for number in range(len(self.nodes))
        ]

    def close(self) -> None:
        self.calls.append(("close", None, {}))


def test_ranks_on_several_machines_get_a_certificate_and_rank_0_its_key(own: Definition, runs: Path) -> None:
    with Lab(own, {"ranks": 2}) as lab:
        for nodes in ([0, 0], [0, 1]):  # the config says nothing of machines: a given World may span some
            world: Any = Told(nodes)
            lab.world = world
            lab._enter()
            several = nodes[1] == 1
            names = [name for name, _, _ in world.calls]
            assert names == (["hold_key", "begin", "learn_ports"] if several else ["begin"])
            keys, (_, ranks, given) = world.calls[: names.index("begin")], world.calls[names.index("begin")]
            assert (ranks, "PRIVATE KEY" in str(given), bool(given["fingerprint"])) == (None, False, several)
            assert given["hosts"] == (["10.0.0.1", "10.0.0.2"] if several else [])
            held = [(name, ranks, "PRIVATE KEY" in given["pem"]) for name, ranks, given in keys]
            assert held == [("hold_key", [0], True)] * several
            assert world.calls[len(keys) + 1 :] == [("learn_ports", None, {"ports": {"sync": 7}})] * several


@pytest.mark.slow
def test_a_step_by_hand_and_a_run_take_a_world(nothing_left: None, runs: Path) -> None:
    with kit.World(2, device="cpu") as world:
        with kit.lab("smoke", world=world, cycles=1) as lab:
            lab.step()
            assert lab.world is world
        assert kit.run("smoke", world=world, cycles=1).verdict().passed
        assert world.state == "idle"


@pytest.mark.slow
def test_tolerances(own: Definition, runs: Path) -> None:
    with Lab(own, {}, tolerances={"seen_often": 0}) as lab:
        run = lab.run()
    assert next(row.passed for row in read_verdict(lab.dir / "verdict.json") if row.check == "seen_often") is False
    assert run.verdict().passed
    with pytest.raises(BadInput, match="seen_often"):
        Lab(own, {}, tolerances={"seen": 0})


def test_a_fault_for_another_device_is_refused(own: Definition, runs: Path) -> None:
    with pytest.raises(BadInput, match="needs cuda"):
        Lab(own, {"device": "cpu"}, fault="cuda-only")
    assert not runs.exists()


def test_a_phases_object_that_cannot_be_made(own: Definition, runs: Path, nothing_left: None) -> None:
    lab = Lab(dataclasses.replace(own, phases="own_lab:Nothing"), {})
    with pytest.raises(RankError, match="Nothing"):
        lab.start()
    assert lab.world.state == "closed"
    assert info(lab)["status"] == "failed"


def test_ranks_that_cannot_start_leave_a_failed_run(own: Definition, runs: Path, nothing_left: None) -> None:
    lab = Lab(dataclasses.replace(own, preload=("no_such_module",)), {"memory_snapshot": True})
    with pytest.raises(KitError, match="no_such_module") as caught, lab:
        lab.run()
    assert not isinstance(caught.value.__context__, AttributeError)
    assert not lab.started
    assert (info(lab)["status"], info(lab)["error"]) == ("failed", lab.error)
    assert "no_such_module" in lab.error
    assert "failed" in repr(lab)


def test_what_only_a_rank_can_refuse_is_bad_input_too(own: Definition, runs: Path, nothing_left: None) -> None:
    lab = Lab(dataclasses.replace(own, phases="own_lab:Choosy"), {})
    with pytest.raises(BadInput, match=r"^low=1 is nothing for the library that this rank has$"):
        lab.start()
    assert lab.world.state == "closed"
    assert info(lab)["status"] == "failed"


@pytest.fixture
def two(own: Definition, runs: Path, nothing_left: None) -> Definition:
    """The test lab in two Worlds: rank 0 in one, all other ranks in the other."""
    return dataclasses.replace(own, roles=split_off(0))


def split_off(rank: int) -> Callable[[Any], list[Role]]:
    """Put the ranks up to this one in a World of their own."""

    def roles(config: Any) -> list[Role]:
        ends = (0, rank + 1, config.ranks)
        return [Role(name=f"part {n}", ranks=tuple(range(ends[n], ends[n + 1])), world=n) for n in range(2)]

    return roles


def values(run: Run, metric: str) -> list[float]:
    return [float(value) for value in run.frame().query("metric == @metric").sort_values("rank")["value"]]


@pytest.mark.slow
def test_a_lab_in_two_worlds(two: Definition) -> None:
    with Lab(two, {"ranks": 3}) as lab:
        assert lab.step().phase == "first"
        run = lab.run()
        pids = lab.world.pids
    assert (run.status, lab.world.state, len(set(pids))) == ("finished", "closed", 3)
    assert values(run, "world") == [0, 1, 1]
    assert values(run, "world_size") == [3, 3, 3]
    assert values(run, "worlds") == [2, 2, 2]
    assert values(run, "own_size") == [1, 2, 2]
    assert len(set(values(run, "meeting"))) == 1
    assert len(values(run, "pss")) == len(values(run, "pss_before")) == 3
    assert run.provenance["rank0"]["versions"]["torch"]
    assert (run.provenance["world"]["ranks"], run.provenance["world"]["sizes"]) == (3, [1, 2])
    assert {path.name for path in (lab.dir / "logs").iterdir()} >= {"rank0.log", "rank1.log", "rank2.log"}


@pytest.mark.slow
def test_a_lab_in_one_world_sees_it_so_and_every_run_has_a_meeting_of_its_own(own: Definition, runs: Path) -> None:
    with World(2, device="cpu") as world:
        made = [Lab(own, {}, world=world).run() for _ in range(2)]
    assert values(made[0], "world") == [0, 0]
    assert values(made[0], "world_size") == values(made[0], "own_size") == [2, 2]
    assert values(made[0], "worlds") == [1, 1]
    assert "sizes" not in made[0].provenance["world"]
    assert values(made[0], "meeting") != values(made[1], "meeting")


@pytest.mark.slow
def test_a_phase_that_raises_in_the_second_world_is_recorded_on_all_ranks(two: Definition) -> None:
    with Lab(two, {"ranks": 3}, fault="breaks") as lab, pytest.raises(RankError, match="told to raise") as caught:
        lab.run()
    assert (caught.value.rank, caught.value.phase) == (1, "second")
    second = Run(lab.dir).frame().query("phase == 'second'")
    assert set(second["rank"]) == {0, 1, 2}
    assert set(second.query("metric == 'failed'")["rank"]) == {1}


@pytest.mark.slow
def test_a_rank_of_the_second_world_that_dies(two: Definition) -> None:
    with Lab(two, {"ranks": 3, "do": "kill"}) as lab, pytest.raises(RankDied) as caught:
        lab.run()
    assert (caught.value.rank, caught.value.signal) == (1, "SIGKILL")
    assert "rank 1" in str(info(lab)["error"])


@pytest.mark.slow
def test_worlds_that_do_not_fit_are_refused_before_a_folder_is_made(
    two: Definition, own: Definition, runs: Path
) -> None:
    with World(3, device="cpu") as world:
        with pytest.raises(
            BadInput, match=r"^this config needs Worlds of 1 and 2 ranks, but world= has 3; pass Worlds of these sizes"
        ):
            Lab(two, {}, world=world)
        with Worlds((1, 2), device="cpu") as several:
            with pytest.raises(BadInput, match="this config needs a World of 3 ranks, but world= has 1 and 2"):
                Lab(own, {}, world=several)
            with pytest.raises(BadInput, match="Worlds made with isolate=True"):
                Lab(dataclasses.replace(two, isolate=True), {}, world=several)
    assert not runs.exists()


@pytest.mark.parametrize(
    ("roles", "sentence"),
    [
        ([Role(name="a", ranks=(0,))], "each rank needs exactly one"),
        ([Role(name="a", ranks=(0, 1)), Role(name="b", ranks=(1,))], "each rank needs exactly one"),
        ([Role(name="a", ranks=(0,), world=1), Role(name="b", ranks=(1,))], "fill Worlds in rank order"),
        ([Role(name="a", ranks=(0, 1), devices=(1,))], "a device per rank, or none"),
    ],
)
def test_roles_that_cannot_be(own: Definition, runs: Path, roles: list[Role], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        Lab(dataclasses.replace(own, roles=lambda _: roles), {})
    assert not runs.exists()


@pytest.mark.slow
def test_a_lab_takes_several_worlds_and_leaves_them_alive(two: Definition) -> None:
    with Worlds((1, 2), device="cpu") as several:
        pids = several.pids
        for _ in range(2):
            with Lab(two, {}, world=several) as lab:
                run = lab.run()
            assert (run.status, run.config["ranks"]) == ("finished", 3)
        assert (several.pids, several.state) == (pids, "idle")
    assert values(run, "world") == [0, 1, 1]


def test_ranks_without_work_in_a_step_are_neither_called_nor_measured(own: Definition, runs: Path) -> None:
    with World(2, device="cpu") as world:
        pair = lambda _: [Role(name="left", ranks=(0,)), Role(name="right", ranks=(1,))]  # noqa: E731 - shorter so
        plan = lambda _: [Step(0, "first"), Step(1, "second", ("right",)), Step(2, "second")]  # noqa: E731
        with Lab(dataclasses.replace(own, roles=pair, plan=plan), {}, world=world) as lab:
            lab.step()
            shown = lab.step()
            run = lab.run()
    assert {row.rank for row in shown.rows} == {1}
    assert "rank 1 (right)" in repr(shown)
    assert set(run.frame().query("phase == 'second' and cycle == 1")["rank"]) == {1}
    assert set(run.frame().query("phase == 'second' and cycle == 2")["rank"]) == {0, 1}
    reported = run.frame().query("metric == 'role'").set_index("rank")["text"].to_dict()
    assert reported == {0: "left", 1: "right"}
    assert run.provenance["world"]["roles"] == {"left": [0], "right": [1]}
    unknown = dataclasses.replace(own, plan=lambda _: [Step(0, "first", ("nobody",))])
    with pytest.raises(ValueError, match="names the role 'nobody', which this lab lacks"):
        Lab(unknown, {})


def test_records_are_on_disk_while_their_phase_lasts(own: Definition, runs: Path, tmp_path: Path) -> None:
    """Rank 1 leaves the phase only after it has found its own record in the run's folder."""
    out = tmp_path / "here"
    slow = dataclasses.replace(own, plan=lambda _: [Step(3, "slow")])
    with (
        World(2, device="cpu", env={"OWN_LAB_RUN": str(out)}) as world,
        Lab(slow, {}, world=world, out=out, observe=Counting) as lab,
    ):
        stepped = lab.step()
        counts = lab._observer.counts  # type: ignore[union-attr]
    assert 1 in [now - before for before, now in zip([0, *counts], counts, strict=False)]  # "early" was reported alone
    assert counts[-1] == len(stepped.rows)
    early = [row for row in stepped.rows if row.metric == "early"]
    assert [(one.text, one.ids, one.value) for one in early] == [("still under way", {"step": 3}, 7.0)]
    frame = Run(out).frame()
    assert frame.query("metric == 'early'")["ids"].tolist() == ['{"step":3}']
    assert len(frame.query("phase == 'slow' and metric == 'seconds'")) == 2


def driven(own: Definition, name: str, **more: Any) -> Definition:
    import own_lab  # type: ignore[import-not-found]

    plan = [Step(0, "first"), Step(1, "drive", driver=f"own_lab:{name}"), Step(2, "second")]
    return dataclasses.replace(own, roles=own_lab.roles, plan=lambda _: plan, **more)


def test_a_driven_step(own: Definition, runs: Path, nothing_left: None) -> None:
    """The driver calls both roles, in separate Worlds; the records have what the roles measured, and the step as a whole."""
    with Lab(driven(own, "driver"), {"device": "cpu"}) as lab:
        lab.step()
        shown = lab.step()
        assert [row["seat"] for row in lab.world.status()] == [None, 4]
        run = lab.run()
    frame = run.frame().query("phase == 'drive' and cycle == 1")
    assert sorted(frame.query("metric == 'sum'")["value"]) == [2, 2, 3, 4, 5]
    calls = frame.query("metric == 'call'")
    assert len(calls) == 5
    assert (calls["time"] >= calls["start"]).all()
    assert set(frame.query("metric == 'seconds'")["rank"]) == {0, 1}
    own_rows = frame.query("rank == -1")
    assert (own_rows["metric"].tolist(), own_rows["text"].tolist()) == (["calls"], ["all of them"])
    assert {row.metric for row in shown.rows} >= {"sum", "call", "calls", "seconds", "rss"}
    assert [row.status for row in lab.phases] == ["done"] * 3
    assert "notebook" in repr(shown)


def test_a_driver_that_leaves_calls_in_flight_is_reported_so(own: Definition, runs: Path, nothing_left: None) -> None:
    with Lab(driven(own, "careless"), {}) as lab:
        with pytest.raises(
            KitError, match=r"returned while calls were in flight \(drive on ranks \[1\]\); wait for them"
        ):
            lab.run()
        assert lab.world.state == "idle"


def test_an_error_in_a_driven_step_leaves_nothing_in_flight(own: Definition, runs: Path, nothing_left: None) -> None:
    with Lab(driven(own, "breaking"), {}) as lab:
        with pytest.raises(RankError, match="a call is told to raise") as caught:
            lab.run()
        assert (caught.value.rank, caught.value.phase) == (1, "drive")
        assert lab.world.state == "idle"
        frame = Run(lab.dir).frame().query("phase == 'drive'")
        assert set(frame.query("metric == 'failed'")["rank"]) == {1}
        assert set(frame.query("metric == 'seconds'")["rank"]) == {0, 1}


class Stops(Onlooker):
    """Acts like a panel's Stop button: its first look ends what is under way."""

    def tick(self, answered: object) -> None:
        if self.seen[-1:] == ["drive"]:
            raise KeyboardInterrupt


def test_a_driven_step_can_be_stopped(own: Definition, runs: Path, nothing_left: None) -> None:
    with Lab(driven(own, "patient"), {}, observe=Stops) as lab:
        lab.step()
        with pytest.raises(KeyboardInterrupt):
            lab.step()
        assert lab.world.state == "idle"
    assert "stopped" in lab.error


def test_a_second_interrupt_while_the_verdict_is_made_leaves_a_closed_run(
    own: Definition, runs: Path, nothing_left: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(lab: Lab) -> NoReturn:
        raise KeyboardInterrupt

    monkeypatch.setattr(Lab, "verdict", interrupted)
    with Lab(driven(own, "patient"), {}, observe=Stops) as lab:
        lab.step()
        with pytest.raises(KeyboardInterrupt):
            lab.step()
        assert Run(lab.dir).status == "stopped"


@pytest.mark.slow
def test_a_death_in_an_isolated_world_is_for_the_driver_to_judge(
    own: Definition, runs: Path, nothing_left: None
) -> None:
    plan = [Step(1, "drive", driver="own_lab:survivor"), Step(2, "second", ("boss",))]
    lonely = dataclasses.replace(driven(own, "survivor", isolate=True), plan=lambda _: plan)
    with Lab(lonely, {}) as lab:
        for _ in plan:
            lab.step()
    frame = Run(lab.dir).frame().query("phase == 'drive'").set_index("metric")
    assert (frame.loc["died", "value"], frame.loc["died", "text"]) == (1, "SIGKILL")
    assert frame.loc["answer", "value"] == 5


BROKEN = {
    "raise": (RankError, "rank 1 failed in phase 'second': RuntimeError: rank 1 is told to raise"),
    "kill": (RankDied, "was killed by SIGKILL in phase 'second'"),
    "hang": (RankTimeout, "no answer from ranks 0, 1 within 3 s; rank 0 in a collective, waiting for rank 1"),
}


@pytest.mark.drawn(1, of="goes on")
@pytest.mark.parametrize("do", BROKEN)
def test_a_lab_that_goes_on_gives_the_next_phase_fresh_ranks_and_fails_at_its_end(
    own: Definition, runs: Path, nothing_left: None, do: str
) -> None:
    kind, words = BROKEN[do]
    lasting = dataclasses.replace(own, goes_on=True, plan=lambda _: [Step(1, "second"), Step(1, "first")])
    with Lab(lasting, {"do": do, "timeout_s": 3.0}) as lab:
        broke = lab.step()
        assert isinstance(lab.broken["second"], kind)
        (row,) = (row for row in broke.rows if row.metric == "broke")
        assert words in row.text
        before = lab.world.pids
        assert {row.rank for row in lab.step().rows if row.metric == "words"} == {0, 1}
        assert lab.world.pids == before  # ranks that worked are kept
        with pytest.raises(KitError, match="these phases broke: second\nsecond: "):
            lab.run()
    assert info(lab)["status"] == "failed"
    assert info(lab)["error"] == "KitError: these phases broke: second"
    assert (lab.dir / "verdict.json").exists()
    assert words in (lab.dir / "logs" / "error.txt").read_text()


def test_a_lab_that_goes_on_ends_when_no_fresh_ranks_are_to_be_had(
    own: Definition, runs: Path, monkeypatch: pytest.MonkeyPatch, nothing_left: None
) -> None:
    def refuses(world: World) -> None:
        raise KitError("no memory for ranks")

    with Lab(dataclasses.replace(own, goes_on=True), {"do": "raise"}) as lab:
        lab.step()
        monkeypatch.setattr(World, "restart", refuses)
        with pytest.raises(KitError, match="no memory for ranks"):
            lab.step()
    assert info(lab)["error"] == "KitError: no memory for ranks"


@pytest.mark.slow
def test_a_driver_gets_fresh_ranks(own: Definition, runs: Path, nothing_left: None) -> None:
    plan = [Step(1, "all", driver="own_lab:replacing"), Step(1, "first")]
    with Lab(dataclasses.replace(own, plan=lambda _: plan), {}) as lab:
        run = lab.run()
    assert run.status == "finished"
    rows = run.frame().query("metric == 'sum'")
    assert sorted(rows["rank"]) == [0, 1]
