"""The first half hour on a rented box: its commands work here, with device=cpu in the place of a GPU."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

import kit
from kit import cli
from kit.cli import pairs, parse_words
from kit.labs.discover import find, find_fault, from_text, validate

PAGE = Path(__file__).resolve().parents[2] / "docs" / "rented-box.md"
HOUR = PAGE.read_text().partition("## 3. The first half hour")[2].partition("\n## ")[0]
STEPS = dict(re.findall(r"\*\*(Minute \d+: .+?)\*\*\n(.*?)(?=\n\*\*|\Z)", HOUR, re.DOTALL))
COMMANDS = re.findall(r"^(kit .+)$", HOUR, re.MULTILINE)
RUNS = [command for command in COMMANDS if command.startswith("kit run")]
# What ends differently without a GPU, or is meant to.
EXITS = {
    "kit run smoke --fault leaked-group": 1,
    "kit run offload --set cycles=6 --set mode=suspend": 2,
    "kit run sync --set transport=ipc": 2,
}


def test_every_step_says_what_it_prints_and_what_to_do_when_it_does_not() -> None:
    assert [re.findall(r"\d+", title)[0] for title in STEPS] == sorted(
        (re.findall(r"\d+", title)[0] for title in STEPS), key=int
    )
    assert len(STEPS) >= 11
    last = list(STEPS)[-1]
    assert [title for title, text in STEPS.items() if title != last and "*If not:*" not in text] == []


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_exists(command: str) -> None:
    args = parse_words(shlex.split(command)[1:])
    if command.startswith("kit run"):
        lab = find(args.lab)
        validate(lab, from_text(lab, pairs("--set", args.set)))
        assert all(find_fault(lab, name) for name in args.fault or ())


def test_checks_that_the_page_names_exist() -> None:
    names = {rule.name for command in RUNS for rule in find(shlex.split(command)[2]).all_rules()}
    assert {"groups_return_to_baseline", "tensors_restored", "bit_exact"} <= names & set(re.findall(r"`(\w+)`", HOUR))


@pytest.mark.slow
@pytest.mark.drawn(1)
@pytest.mark.parametrize("command", RUNS)
def test_a_run_ends_on_the_cpu_as_the_page_says(
    command: str, nothing_left: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KIT_RUNS", str(tmp_path))
    with pytest.raises(SystemExit) as ended:
        raise SystemExit(cli.main([*shlex.split(command)[1:], "--set", "device=cpu"]))
    assert ended.value.code == EXITS.get(command, 0)


def test_the_world_of_the_page_blames_the_rank_that_sleeps(
    nothing_left: None, capfd: pytest.CaptureFixture[str]
) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", HOUR, re.DOTALL)
    quick = code.replace("timeout_s=10", "timeout_s=1, device='cpu'")
    with pytest.raises(kit.RankTimeout, match="rank 0 in a collective, waiting for rank 1") as caught:
        exec(quick, {})
    assert capfd.readouterr().out.splitlines() == ["[0] 3.0", "[1] 3.0"]
    assert "time.sleep(600)" in caught.value.stacks[1]
