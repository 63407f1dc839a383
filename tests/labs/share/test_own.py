"""User code for a pipeline's side of the desk: right code behaves like the kit's, and the errors of wrong code are reported."""

from __future__ import annotations

from pathlib import Path

import pytest

import kit
from kit.errors import BadInput
from kit.labs.share.simulated import run
from kit.share.member import Desk, Pipeline
from tests.labs.share.conftest import share, simulated
from tests.labs.simulated import failed, passed

SMALL = {"steps": 2, "groups": 2, "group": 2}


class Right:
    """Written from the documentation; it uses nothing of the kit but the handle it is given."""

    def __init__(self, desk: Desk) -> None:
        self.desk = desk
        self.calls: list[str] = []
        Right.last = self

    last: Right

    def collector_created(self) -> None:
        self.calls.append("created")
        self.desk.request("generation")

    def begin_progress(self, completed: int, target: int) -> None:
        self.calls.append("begin_progress")
        self.desk.progress(completed, target)

    def before_training(self, step: int) -> None:
        self.calls.append(f"before_training {step}")
        self.desk.request("training")

    def before_weight_sync(self, step: int) -> None:
        self.calls.append(f"before_weight_sync {step}")

    def after_training(self, step: int) -> int:
        self.calls.append(f"after_training {step}")
        self.desk.release("training")
        return step + 1

    def end_progress(self) -> None:
        self.calls.append("end_progress")
        self.desk.progress_end()


class NeverAsks(Pipeline):
    def before_training(self, step: int) -> None:
        pass


class NeverReleases(Pipeline):
    def after_training(self, step: int) -> int:
        return step + 1


class Raises(Pipeline):
    def before_weight_sync(self, step: int) -> None:
        raise ValueError("no cache")


class OldVersion(Pipeline):
    def after_training(self, step: int) -> int:
        super().after_training(step)
        return step


class AsksTwice(Pipeline):
    def before_training(self, step: int) -> None:
        self.desk.request("training")
        self.desk.request("reference")


class FailsAtTheEnd(Pipeline):
    def end_progress(self) -> None:
        raise ValueError("no desk")


class FailsTwice(OldVersion):
    def end_progress(self) -> None:
        raise ValueError("no desk")


class KeepsProgress(Pipeline):
    def end_progress(self) -> None:
        pass


def of(kind: type) -> str:
    return f"{__name__}:{kind.__name__}"


def test_the_kits_own_asks_for_what_a_member_asks_for() -> None:
    rows = [
        [(row.event, row.time, row.ids) for row in run(share(simulated=True, pipeline=name)).rows]
        for name in (of(Pipeline), share().pipeline)
    ]
    assert len(rows[0]) > 500
    assert rows[0] == rows[1]


def test_somebody_elses_hears_each_moment_once_and_in_order() -> None:
    verdict, error = simulated(pipeline=of(Right), gate="5", **SMALL)
    assert (failed(verdict), error) == (set(), "")
    assert passed(verdict, "gate_shown") is True
    run(share(simulated=True, pipeline=of(Right), **SMALL))
    first = ["before_training 0", "before_weight_sync 0", "begin_progress", "after_training 0"]
    second = ["before_training 1", "before_weight_sync 1", "after_training 1"]
    assert Right.last.calls == ["begin_progress", "created", *first, *second, "end_progress"]


@pytest.mark.parametrize(
    ("kind", "check", "words"),
    [
        (NeverAsks, "no_deadlock", "the run is stuck: "),
        (NeverReleases, "loops_right", ""),
        (Raises, "no_deadlock", "before_weight_sync(0) of the pipeline's own code raised ValueError: no cache"),
        (OldVersion, "no_deadlock", "after_training(0) of the pipeline's own code returned version 0; it must return the loop's version 1"),
        (AsksTwice, "no_deadlock", "acquire failed: b cannot request reference on reference"),
        (FailsAtTheEnd, "no_deadlock", "end_progress() of the pipeline's own code raised ValueError: no desk"),
        (FailsTwice, "no_deadlock", "after_training(0) of the pipeline's own code returned version 0"),  # the first error
        (KeepsProgress, "progress_ended", ""),
    ],
)  # fmt: skip
def test_a_wrong_one_is_found_out(kind: type, check: str, words: str) -> None:
    verdict, error = simulated(pipeline=of(kind), **SMALL)
    assert check in failed(verdict)
    assert words in error


def test_gate_5_needs_one() -> None:
    with pytest.raises(BadInput, match=r"give it as pipeline=module:attr"):
        share(gate="5")


@pytest.mark.slow
def test_on_ranks_both_pipelines_compute_what_they_compute_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KIT_RUNS", str(tmp_path))
    verdict = kit.run("share", gate="5", pipeline=of(Right), rehearse=False, **SMALL).verdict()
    assert failed(verdict) == set()
    assert passed(verdict, "same_numbers") is True
