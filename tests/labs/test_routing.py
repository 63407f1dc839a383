"""`routing=torchcomms` in a lab: with a stand-in for torchcomms, with the package index's placeholder, and switched off."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

import kit
from kit.cli import main
from kit.errors import BadInput
from kit.labs.definition import LabConfig
from kit.labs.discover import find, validate
from kit.labs.lab import routing_env
from kit.results import Row, Run, outcomes, to_frame
from kit.results.growth import routing_effective
from kit.routing import FLAGS, NCCL2, TORCHCOMMS
from kit.world import World
from tests.test_routing import STANDINS, package

COUNTED = ["groups", "groups_before", "wrong_values", "talked_groups", "digest"]
SMALL: dict[str, Any] = {"cycles": 1, "device": "cpu"}


@pytest.fixture
def standin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(STANDINS), prepend=os.pathsep)


def rows(run: Run) -> dict[str, dict[int, float]]:
    found = run.frame().query("phase == 'run' and metric.str.startswith('routing_')")
    return {
        str(metric): dict(zip(some["rank"], some["value"], strict=True)) for metric, some in found.groupby("metric")
    }


@pytest.mark.slow
def test_a_routed_lab_comes_to_the_same(standin: None, runs: Path, nothing_left: None) -> None:
    off, on = (kit.run("smoke", routing=way, **SMALL) for way in ("torch", "torchcomms"))
    assert on.verdict().passed
    (row,) = [row for row in on.verdict() if row.check == "routing_effective"]
    assert (row.passed, row.measured, row.why) == (True, 1.0, "5 of 5 groups on rank 0 go through torchcomms")
    assert rows(on)["routing_effective"] == {0: 1.0, 1: 1.0}
    assert rows(on)["routing_groups"] == {0: 5.0, 1: 5.0}
    assert on.provenance["routing"]["effective"] is True
    assert outcomes(off, on) == (2, 0, "digests", 0)
    # Off behaves as if the setting did not exist.
    assert not rows(off)
    assert "routing" not in off.provenance
    assert "routing_effective" not in {row.check for row in off.verdict()}
    assert (
        kit.load(off.dir).verdict(routing_effective=0.5) == off.verdict()
    )  # a limit set in a panel that showed another run before
    tables = [run.frame().query(f"metric in {COUNTED} and phase != 'run'") for run in (off, on)]
    values = [table.set_index(["cycle", "phase", "rank", "metric"])[["value", "text"]] for table in tables]
    assert values[0].equals(values[1].reindex(values[0].index))  # a digest is text; its value is NaN


@pytest.mark.slow
def test_the_placeholder_fails_the_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runs: Path, capsys: Any
) -> None:
    package(tmp_path, "0.0.1", "raise ImportError('a name without code')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    status = main(["run", "smoke", "--set", "routing=torchcomms", "--set", "cycles=1", "--set", "device=cpu", "--json"])
    assert status == 1
    message = json.loads(capsys.readouterr().out.splitlines()[-1])
    failed = [row for row in message["verdict"] if row["passed"] is False]
    assert [row["check"] for row in failed] == ["routing_effective"]
    assert failed[0]["why"] == ("requested but not in effect on rank 0: ImportError: a name without code")
    run = kit.load(message["run"])
    assert run.verdict().failed[0].check == "routing_effective"  # judged again from the records
    assert "a name without code" in run.provenance["routing"]["why"]
    assert rows(run)["routing_importable"] == {0: 0.0, 1: 0.0}


FUNCTIONS = "[getattr(dist.distributed_c10d, name).__module__ for name in ('_new_process_group_helper', 'new_group')]"
# Except one that torch sets on import: ranks inherit it if this process has imported torch by then.
NAMES = "sorted({*__import__('os').environ} - {'TORCHINDUCTOR_CACHE_DIR'})"


@pytest.mark.slow
def test_not_asked_for_nothing_differs(standin: None, runs: Path, nothing_left: None) -> None:
    def seen(world: World) -> list[Any]:
        assert world.eval("dist.distributed_c10d.new_comm is __import__('torchcomms').new_comm") == [True, True]
        assert world.eval("__import__('kit.routing').routing.state.installed") == [False, False]
        assert world.call("torchcomms:calls") == [[], []]
        return [world.eval(FUNCTIONS), world.eval(NAMES)]

    with World(2, device="cpu") as plain:
        before = seen(plain)
    with kit.lab("smoke", **SMALL) as lab:
        lab.run()
        after = seen(lab.world)
    assert before[0] == after[0] == [["torch.distributed.distributed_c10d"] * 2] * 2
    assert before[1] == after[1]
    assert not any(FLAGS[TORCHCOMMS] in names for names in after[1])


def test_what_torchcomms_cannot_do_is_refused() -> None:
    for way in ("torchcomms", "nccl2"):
        with pytest.raises(BadInput, match=f"mode=suspend needs routing=torch: {way} cannot suspend"):
            validate(find("offload"), {"mode": "suspend", "routing": way})


@pytest.mark.parametrize(
    ("exported", "routing", "env"),
    [
        ({}, "torch", {}),
        ({}, "torchcomms", {FLAGS[TORCHCOMMS]: "1"}),
        ({}, "nccl2", {FLAGS[NCCL2]: "1"}),
        ({FLAGS[TORCHCOMMS]: "1", FLAGS[NCCL2]: "1"}, "torch", {FLAGS[TORCHCOMMS]: "0", FLAGS[NCCL2]: "0"}),
        ({FLAGS[TORCHCOMMS]: "1"}, "nccl2", {FLAGS[TORCHCOMMS]: "0", FLAGS[NCCL2]: "1"}),
    ],
)
def test_the_flags_of_ranks_are_those_of_the_config(
    exported: dict[str, str], routing: str, env: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (FLAGS[TORCHCOMMS], FLAGS[NCCL2]):
        monkeypatch.delenv(name, raising=False)
    for name, value in exported.items():
        monkeypatch.setenv(name, value)
    assert routing_env(LabConfig(routing=routing)) == env  # type: ignore[arg-type]


@pytest.mark.slow
def test_a_world_that_is_given_must_have_been_started_for_it(standin: None, runs: Path, nothing_left: None) -> None:
    with (
        World(2, device="cpu") as plain,
        pytest.raises(BadInput, match=f"make the World with env=.*{FLAGS[TORCHCOMMS]}"),
    ):
        kit.run("smoke", world=plain, routing="torchcomms", **SMALL)
    with World(2, device="cpu", env={FLAGS[TORCHCOMMS]: "1"}) as routed:
        run = kit.run("smoke", world=routed, routing="torchcomms", **SMALL)
        with pytest.raises(
            BadInput, match=f"routing=torch, but these ranks go through torchcomms; .*{FLAGS[TORCHCOMMS]}"
        ):
            kit.run("smoke", world=routed, **SMALL)
    assert run.verdict().passed


@pytest.mark.slow
def test_the_config_says_what_is_in_effect_whatever_is_exported(
    standin: None, runs: Path, nothing_left: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FLAGS[TORCHCOMMS], "1")
    with kit.lab("smoke", **SMALL) as lab:
        lab.run()
        assert lab.world.call("torchcomms:calls") == [[], []]


def frame(**values: dict[int, float]) -> Any:
    return to_frame(
        [
            Row(
                run="r",
                lab="l",
                cycle=0,
                phase="run",
                rank=rank,
                metric=f"routing_{metric}",
                value=value,
                unit="1",
                time=0.0,
            )
            for metric, by_rank in values.items()
            for rank, value in by_rank.items()
        ]
    )


def test_a_group_that_went_past_it_fails_the_check() -> None:
    reported = frame(
        effective={0: 1.0, 1: 1.0},
        groups={0: 4.0, 1: 4.0},
        groups_effective={0: 4.0, 1: 3.0},
        options_lost={0: 0.0, 1: 2.0},
    )
    found = routing_effective(reported, {"routing": "torchcomms"})
    assert (found.value, found.why) == (
        0.75,
        "3 of 4 groups on rank 1 go through torchcomms; 2 options were dropped, see run.json",
    )
