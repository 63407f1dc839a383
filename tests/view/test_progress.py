"""The progress bar names ranks that answered and ranks that did not; without a terminal nothing is written; a terminal's line is erased."""

from __future__ import annotations

import os
import pty
import subprocess
import sys

import pytest

import kit
from kit.results.records import STEP_LINE
from kit.view.progress import Line, Progress, bar_html, progress_line, ranks_short


class Notes(Line):
    def __init__(self):
        self.lines: list[tuple[float, str]] = []
        self.left = 0

    def draw(self, fraction, text):
        self.lines.append((fraction, text))

    def leave(self):
        self.left += 1


@pytest.mark.parametrize(
    ("ranks", "text"), [([], ""), ([3], "3"), ([0, 1, 2, 3], "0-3"), ([5, 0, 1, 3], "0-1, 3, 5"), ([2, 2], "2")]
)
def test_ranks_are_reported_short(ranks, text):
    assert ranks_short(ranks) == text


def test_a_bar_names_phase_and_ranks():
    notes = Notes()
    watch = Progress(line=notes, after_s=0)
    watch.started("reload", [0, 1, 2, 3])
    watch._drew = 0.0
    watch.tick([0, 2])
    fraction, text = notes.lines[-1]
    assert fraction == 0.5
    assert text.startswith("reload · answered: 0, 2 · waiting for: 1, 3 · ")


def test_a_bar_counts_what_is_recorded_while_a_phase_lasts():
    notes = Notes()
    watch = Progress(line=notes, after_s=0)
    for phase, words in (("reload", "2 records so far · "), ("train", "waiting for: 0 · 0 s")):
        watch.started(phase, [0])
        watch._drew = 0.0
        if phase == "reload":
            watch.recorded(2)
        watch.tick([])
        assert words in notes.lines[-1][1]


def test_lines_of_training_steps_stay_in_the_log(capsys):
    watch = Progress(line=Notes())
    watch.output(1, f"{STEP_LINE}1: loss 5.5, grad norm 1, resident 2.0 MiB, 3 ms\nmy own step 1")
    assert capsys.readouterr().out == "[1] my own step 1\n"


def test_quick_work_has_no_bar():
    notes = Notes()
    watch = Progress(line=notes)
    watch.started("reload", [0, 1])
    watch.tick([0])
    watch.ended()
    assert notes.lines == []


def test_a_bar_over_several_calls_fills_once():
    notes = Notes()
    watch = Progress(total=4, line=notes, after_s=0)
    for phase in ("create", "talk", "destroy", "count"):
        watch.started(phase, [0, 1])
        watch.ended()
    fractions = [fraction for fraction, _ in notes.lines]
    assert fractions == sorted(fractions)
    assert fractions[-1] == 1.0
    assert notes.lines[-1][1].startswith("count · 4 of 4 · ")


def test_the_next_call_has_a_bar_of_its_own():
    notes = Notes()
    watch = Progress(line=notes)
    watch.started("slow", [0, 1])
    watch._began -= 60
    watch.tick([0])
    assert notes.lines[-1][1].endswith("waiting for: 1 · 60 s")
    watch.ended()
    assert notes.lines[-1] == (1.0, "slow · 60 s")
    assert notes.left == 1
    watch.started("quick", [0, 1])
    watch.tick([0])
    watch.ended()
    assert notes.lines[-1] == (1.0, "slow · 60 s")  # not the time since the first call


def test_ranks_that_are_started_are_not_those_that_a_call_waits_for():
    notes = Notes()
    watch = Progress(line=notes, after_s=0)
    watch.started("hang", [0, 1])
    watch.ended()
    watch.tick(())
    assert (notes.lines[-1][1], notes.left) == ("hang · 0 s", 1)


def test_nobody_watches_a_test():
    assert type(progress_line()) is Line


def test_output_is_marked_in_whole_lines(capsys):
    Progress().output(1, "one\ntwo")
    assert capsys.readouterr().out == "[1] one\n[1] two\n"


def test_names_are_escaped_for_a_page():
    page = bar_html(0.5, '<b>"x"</b>')
    assert "<b>" not in page
    assert 'aria-label="&lt;b&gt;&quot;x&quot;' in page


def test_a_full_bar_leaves_its_words():
    assert "<progress" in bar_html(0.9, "reload · 3 s")
    assert "<progress" not in bar_html(1.0, "reload · 3 s")
    assert "reload · 3 s" in bar_html(1.0, "reload · 3 s")


SCRIPT = """
import sys
from kit.view.progress import Progress, Terminal
watch = Progress(after_s=0)
assert isinstance(watch._line, Terminal)
watch.started("train", [0, 1])
watch.output(0, "hello")
watch.ended()
"""


def test_a_terminal_has_its_line_back_at_the_end():
    master, slave = pty.openpty()
    done = subprocess.run([sys.executable, "-c", SCRIPT], stderr=slave, stdout=subprocess.PIPE, timeout=60)
    os.close(slave)
    shown = os.read(master, 10_000).decode()
    os.close(master)
    assert done.returncode == 0, shown
    assert "waiting for: 0-1" in shown
    assert shown.endswith("\r\x1b[2K")
    assert b"hello" in done.stdout


def test_no_bar_waits_for_ranks_beside_an_idle_world(world):
    notes = Notes()
    before, world.observer = world.observer, Progress(line=notes, after_s=0)
    try:
        with pytest.raises(kit.RankTimeout):
            world.run("import time; time.sleep(60)", timeout_s=0.3)
        assert "waiting" not in notes.lines[-1][1]
        world.restart()
        assert "waiting" not in notes.lines[-1][1]
    finally:
        world.observer = before


def test_a_real_world_is_watched(world, capsys):
    notes = Notes()
    before, world.observer = world.observer, Progress(line=notes, after_s=0)
    try:
        world.run("import time\nprint('from', rank)\ntime.sleep(0.4 * rank)")
    finally:
        world.observer = before
    assert sorted(capsys.readouterr().out.splitlines()) == ["[0] from 0", "[1] from 1"]
    assert any("answered: 0 · waiting for: 1" in text for _, text in notes.lines)
