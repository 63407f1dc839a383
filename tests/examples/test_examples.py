"""User code in the labs: right examples pass every check, and each bug fails the check that is meant to catch it."""

from __future__ import annotations

import ast
import importlib
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import kit
from kit.labs.discover import find, validate
from kit.results import Verdict
from tests.examples import page
from tests.examples.cases import CASES, Case
from tests.holdings import nothing_added
from tests.labs.parts import failed, why

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "docs" / "examples"
SHARED = Path("/dev/shm")
SHOWN_ELSEWHERE = {
    "ledger",
    "own_controller",
    "own_pair",
    "own_planner",
    "own_sampler",
    "own_script",
    "own_split",
    "own_transport",
    "own_wrapper",
    "parcel_charts",
    "parcel_lab",
    "ray_actors",
    "ray_share",
    "tiny_lab",
    "weight_files",
}


@pytest.fixture(scope="module", autouse=True)
def _places(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Put runs and temporary files in a folder of the module, and remove what leaking examples leave in shared memory."""
    folder = tmp_path_factory.mktemp("examples")
    (folder / "tmp").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KIT_RUNS", str(folder / "runs"))
        patch.setenv("TMPDIR", str(folder / "tmp"))
        patch.chdir(ROOT)
        with nothing_added():
            yield
            while WORLDS:
                WORLDS.popitem()[1].close()
        shutil.rmtree(folder / "tmp")
        for segment in SHARED.glob("example-weights-*"):
            segment.unlink()


def unanswered(verdict: Verdict) -> set[str]:
    return {row.check for row in verdict if row.passed is None} - ASKED_FOR


NULLS: dict[str, set[str]] = {}
ASKED_FOR = {"restore_failure_is_clean", "rehearsals_leave_nothing"}  # judged only where own code says `retries = True`


def null_for_the_kit(case: Case) -> set[str]:
    """Return the checks that cannot be judged with these settings, even for the kit's own code."""
    key = repr((case.lab, case.shared))
    if key not in NULLS:
        NULLS[key] = unanswered(verdict_of(case.lab, case.shared))
    return NULLS[key]


WORLDS: dict[int, kit.World] = {}


def verdict_of(lab: str, config: dict[str, Any]) -> Verdict:
    """Return the verdict of a run in a shared World, on restarted ranks: user code may leave anything behind on them."""
    ranks = validate(find(lab), config).ranks
    if ranks in WORLDS:
        WORLDS[ranks].restart()
    else:
        WORLDS[ranks] = kit.World(ranks, device="cpu", preload=["megatron.core"])
    return kit.run(lab, world=WORLDS[ranks], **config).verdict()


def wrong_with(case: Case) -> list[str]:
    """Return the differences between this case's verdict and the expected one."""
    verdict = verdict_of(case.lab, case.config)
    if case.fails:
        return [] if case.fails in failed(verdict) else [f"{case.fails} did not fail: {sorted(failed(verdict))} did"]
    rows = [f"{check} failed: {why(verdict, check)}" for check in sorted(failed(verdict))]
    if not case.field:  # for a user's own job, other checks cannot be judged than for the kit's
        rows += [f"{name} was not judged" for name in sorted(unanswered(verdict) - null_for_the_kit(case))]
    return rows


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=case.code, marks=[pytest.mark.slow, pytest.mark.drawn(1, of=case.lab)]) for case in CASES],
)
def test_the_verdict_is_right(case: Case) -> None:
    assert not wrong_with(case)


def test_every_example_is_tried() -> None:
    """Every example class that a lab accepts is a case."""
    tried = {case.code for case in CASES}
    modules = {code.partition(":")[0] for code in tried}
    assert {path.stem for path in EXAMPLES.glob("*.py")} == modules | SHOWN_ELSEWHERE
    for module in modules:
        under_test = {code.partition(":")[2] for code in tried if code.startswith(f"{module}:")}
        for node in ast.parse((EXAMPLES / f"{module}.py").read_text()).body:
            if isinstance(node, ast.ClassDef) and {getattr(base, "id", "") for base in node.bases} & under_test:
                assert node.name in under_test


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_the_command_of_an_example_runs_from_the_root(path: Path) -> None:
    """The command in its first lines names the file from the root. Files with a verdict all have one."""
    head = ast.get_docstring(ast.parse(path.read_text())) or ""
    named = re.findall(r"kit run .*=([\w.]+):(\w+)", head)
    assert named or path.stem in SHOWN_ELSEWHERE
    for module, name in named:
        assert module == f"docs.examples.{path.stem}"
        assert hasattr(importlib.import_module(module), name)
    for script in re.findall(r"docs/examples/\w+\.py", head):
        assert (ROOT / script) == path


def test_the_page_of_examples_is_that_of_the_cases() -> None:
    assert page.PAGE.read_text() == page.text(), "run `python -m tests.examples.page`"
