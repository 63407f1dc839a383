"""The magics in a real shell with real ranks."""

from __future__ import annotations

import numpy as np
import pytest
from IPython.core.completer import provisionalcompleter
from IPython.core.error import UsageError

from kit.errors import BadInput, KitError, RankError, RankTimeout
from kit.view.magics import RankValues, parse_ranks


@pytest.fixture(autouse=True)
def named(shell, world):
    shell.user_ns["mine"] = world
    yield
    shell.user_ns.pop("mine", None)


@pytest.mark.parametrize(
    ("words", "ranks"),
    [([], [0, 1, 2, 3]), (["0,2"], [0, 2]), (["1-3"], [1, 2, 3]), (["3,0-1"], [0, 1, 3]), (["0,", "2"], [0, 2])],
)
def test_ranks_are_read(words, ranks):
    assert parse_ranks(words, 4) == ranks


@pytest.mark.parametrize("word", ["x", "-", "1-", "-1", "3-1", "4", "0-4", "1-2-3"])
def test_wrong_ranks_are_reported(word):
    with pytest.raises(UsageError, match=r"ranks"):
        parse_ranks([word], 4)


def test_values_are_grouped():
    assert repr(RankValues(dict.fromkeys(range(4), "3.0"))) == "[0-3] 3.0"
    assert repr(RankValues({0: "a", 1: None, 2: "b\nc"})) == "[0] a\n[2] b\n    c"


def test_a_cell_runs_on_all_ranks_and_shows_the_last_line(cell):
    result, shown = cell("%%ranks\nx = torch.ones(1) * (rank + 1)\ndist.all_reduce(x)\nprint('I am', rank)\nx.item()")
    assert result.success
    assert repr(result.result) == "[0-1] 3.0"
    assert {"[0] I am 0", "[1] I am 1"} <= set(shown.splitlines())


def test_some_ranks_and_names_that_persist(cell):
    assert cell("%%ranks\nkept = rank * 10")[0].result is None
    assert repr(cell("%%ranks 1\nkept")[0].result) == "[1] 10"


def test_an_error_is_an_exception_without_plumbing(cell):
    result, shown = cell("%%ranks\nraise ValueError('on purpose')")
    assert isinstance(result.error_in_exec, RankError)
    assert result.error_in_exec.ranks == (0, 1)
    assert shown.count("Traceback") == 1  # identical on both ranks, so shown once
    assert "on purpose" in shown
    assert "kit/world" not in shown
    assert "kit/view" not in shown


def test_plain_calls_show_the_line_that_asked(cell):
    result, shown = cell("a = 1\nmine.run('1 / 0')\nb = 2")
    assert isinstance(result.error_in_exec, RankError)
    assert "line 2 of the cell: mine.run('1 / 0')" in shown
    assert "kit/world" not in shown


def test_cells_in_the_background_run_beside_each_other_and_are_waited_for(cell, world, tmp_path):
    meet = f"import pathlib, time\nhere = pathlib.Path({str(tmp_path)!r})\n(here / str(rank)).touch()\n"
    meet += "while len(list(here.iterdir())) < 2: time.sleep(0.001)\nrank * 10"
    for rank in (1, 0):
        result, shown = cell(f"%%ranks {rank} --background\n{meet}")
        assert result.result is None
        assert f"running in the background on {rank}; %ranks wait shows the result" in shown
    assert repr(cell("%ranks wait")[0].result) == "[0] 0\n[1] 10"
    assert "no cell is running in the background" in cell("%ranks wait")[1]
    assert world.state == "idle"


def test_an_error_in_the_background_is_raised_by_the_wait(cell, world):
    assert cell("%%ranks --background\nraise ValueError('in the dark')")[0].success
    result, shown = cell("%ranks wait")
    assert isinstance(result.error_in_exec, RankError)
    assert "in the dark" in shown
    assert world.state == "idle"


def test_a_typo_is_reported_before_any_rank_sees_it(cell, world):
    result, shown = cell("%%ranks\nx = = 1")
    assert isinstance(result.error_in_exec, BadInput)
    assert "SyntaxError: invalid syntax" in shown
    assert world.state == "idle"


def test_a_deadline(cell, world):
    result, shown = cell("%%ranks 1 --timeout 0.3\nimport threading; threading.Event().wait()")
    assert isinstance(result.error_in_exec, RankTimeout)
    assert result.error_in_exec.ranks == (1,)
    assert "Event().wait()" in shown
    stacks, shown = cell("%ranks stacks")
    assert stacks.success
    assert "rank 1:" in shown
    assert "Event().wait()" in shown
    assert cell("%ranks restart")[0].result is world
    assert repr(cell("%%ranks\nrank")[0].result) == "[0] 0\n[1] 1"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("%ranks bogus", "status, stacks, wait, push, pull, restart, stop"),
        ("%ranks push", "%ranks push accepts names of variables, such as `%ranks push x`"),
        ("%ranks push not_here", "the notebook has no variable 'not_here'"),
        ("%ranks status 3", "accepts no further arguments"),
        ("%%ranks --timeout soon\n1", "invalid float value: 'soon'"),
        ("%%ranks --bogus\n1", "usage: %%ranks [0,2-3] [--timeout SECONDS]"),
        ("%%ranks 9\n1", "this World has ranks 0 to 1, not '9'"),
    ],
)
def test_wrong_words_get_one_sentence(cell, line, words):
    result, shown = cell(line)
    assert isinstance(result.error_in_exec, UsageError)
    assert words in shown
    assert len(shown.strip().splitlines()) == 1


@pytest.mark.parametrize("seconds", ["0", "-1", "nan"])
def test_wrong_seconds(cell, seconds):
    result, _ = cell(f"%%ranks --timeout {seconds}\n1")
    assert isinstance(result.error_in_exec, KitError)


def test_status_is_the_world(cell, world):
    assert cell("%ranks")[0].result is world
    assert cell("%ranks status")[0].result is world


def test_variables_go_to_the_ranks_and_come_back(cell, shell):
    shell.user_ns.update(numbers={"a": [1, 2.5]}, array=np.arange(3), wrong=object())
    assert cell("%ranks push numbers array")[0].success
    assert cell("%%ranks\nback = torch.tensor(array) * (rank + 1) + numbers['a'][0]")[0].success
    assert cell("%ranks pull back")[0].success
    assert shell.user_ns["back"] == [[1, 2, 3], [1, 3, 5]]
    result, shown = cell("%ranks push wrong")
    assert isinstance(result.error_in_exec, BadInput)
    assert "wrong: Object of type object is not JSON serializable" in shown
    shell.user_ns["wrong"] = [{"a": {1: "x"}}]  # JSON would make it {"1": "x"}
    assert "%ranks push sends dicts with text as keys; wrong has the key 1" in cell("%ranks push wrong")[1]


def test_names_on_ranks_are_completed(cell, shell):
    assert cell("%%ranks\nonly_on_ranks = torch.ones(2)")[0].success

    def completed(text):
        with provisionalcompleter():
            return {completion.text for completion in shell.Completer.completions(text, len(text))}

    assert "only_on_ranks" in completed("%%ranks\nonly_on")
    assert any(name.endswith("dist.all_reduce") or name == "all_reduce" for name in completed("%%ranks\ndist.all_red"))
    assert "only_on_ranks" not in completed("only_on")
    assert "only_on_ranks" not in completed("%%ranks\nno.such.only_on")
    asking = "class Own:\n    asked = 0\n    @property\n    def late(self):\n        Own.asked += 1\n        return self\nown = Own()"
    assert cell(f"%%ranks\n{asking}")[0].success
    assert any(name.endswith("late") for name in completed("%%ranks\nown.la"))
    completed("%%ranks\nown.late.as")
    assert repr(cell("%%ranks 0\nOwn.asked")[0].result) == "[0] 0"  # a property may wait for other ranks


def test_the_waiting_agent_is_shown(cell):
    assert "waits for the next World (pid " in cell("%ranks status")[1]
