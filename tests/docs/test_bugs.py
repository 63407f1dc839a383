"""The page of known bugs: each command names a fault or an example that exists, and the check beside it is the one that catches it."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import NamedTuple

import pytest

from kit.cli import pairs, parse_words
from kit.labs.discover import discover, find, find_fault, from_text, validate
from tests.examples.cases import CASES

PAGE = Path(__file__).resolve().parents[2] / "docs" / "bugs.md"


class Bug(NamedTuple):
    links: list[str]
    lab: str
    check: str
    words: list[str]
    left_out: str


def bugs() -> list[Bug]:
    table = []
    for line in PAGE.read_text().splitlines():
        if line.startswith("| ["):
            named, _, check, command, left_out = (cell.strip() for cell in line.strip("|").split("|"))
            words = shlex.split(command.strip("`"))
            lab = words[2] if words else ""
            table.append(Bug(re.findall(r"\((https://\S+?)\)", named), lab, check.strip("`"), words, left_out))
    return table


BUGS = bugs()


def test_the_page_has_each_bug_once() -> None:
    links = [link for bug in BUGS for link in bug.links]
    assert len(BUGS) >= 25
    assert len(links) == len(set(links))
    assert all(re.fullmatch(r"https://github\.com/[\w-]+/[\w-]+/(issues|pull)/\d+", link) for link in links)


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.links[0].removeprefix("https://github.com/"))
def test_a_command_of_the_page_shows_what_its_row_says(bug: Bug) -> None:
    if not bug.words:
        assert bug.left_out, "a bug without a command needs the reason"
        return
    assert bug.check in {rule.name for rule in find(bug.lab).all_rules()}
    assert bug.words[:2] == ["kit", "run"]
    args = parse_words(bug.words[1:])
    lab = find(args.lab)
    settings = from_text(lab, pairs("--set", args.set))
    validate(lab, settings)
    assert lab.name == bug.lab
    if args.fault:
        fault = find_fault(lab, *args.fault)
        assert fault is not None
        assert (fault.caught_by, fault.exit) == (bug.check, 1)
    else:
        assert any(settings.items() <= case.config.items() and case.fails == bug.check for case in CASES)


def test_faults_name_their_public_bugs_as_the_page_does() -> None:
    def short(link: str) -> str:
        return re.sub(r"https://github\.com/(.+)/(?:issues|pull)/", r"\1#", link)

    named = {
        (lab.name, fault.name): {*fault.bugs} for lab in discover().labs.values() for fault in lab.faults if fault.bugs
    }
    on_page = {
        (bug.lab, bug.words[bug.words.index("--fault") + 1]): {*map(short, bug.links)}
        for bug in BUGS
        if "--fault" in bug.words
    }
    assert named == on_page
