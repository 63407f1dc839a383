"""A verdict in a notebook: worst first, in words as well as colours, and all text escaped."""

from __future__ import annotations

from kit.results import Verdict, VerdictRow

VERDICT = Verdict(
    [
        VerdictRow("fine", 0.0, 0.0, "1", True, ""),
        VerdictRow("unknown", None, 4.0, "1", None, "not measured: no <records>"),
        VerdictRow("broken", 51.25, 50.0, "MiB", False, "rank 1 & 2"),
    ]
)


def test_worst_first_and_escaped():
    page = VERDICT._repr_html_()
    assert page.index("broken") < page.index("unknown") < page.index("fine")
    assert "1 failed, 1 passed, 1 not measured" in page
    assert 'white-space:nowrap">51.2 MiB<' in page  # not broken before its unit
    assert "rank 1 &amp; 2" in page
    assert ">no &lt;records&gt;<" in page  # the mark before it says that it was not measured


def test_the_shell_shows_it(shell):
    shell.user_ns["verdict"] = VERDICT
    data, _ = shell.display_formatter.format(VERDICT)
    assert data["text/html"] == VERDICT._repr_html_()
    assert "FAIL" in data["text/plain"]
