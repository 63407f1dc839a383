from __future__ import annotations

import pytest
from IPython.core.interactiveshell import InteractiveShell

import kit
from kit.results import Row, create_run
from kit.view import magics


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    with kit.World(ranks=2, device="cpu", logs=tmp_path_factory.mktemp("logs")) as world:
        yield world


@pytest.fixture(scope="module")
def shell():
    """A real shell with the magics, one per test file because IPython keeps global state."""
    shell = InteractiveShell.instance()
    magics.load_extension(shell)
    yield shell
    InteractiveShell.clear_instance()


@pytest.fixture
def cell(shell, capsys):
    """Run a cell; return its result and what it printed."""

    def run(text: str):
        capsys.readouterr()
        result = shell.run_cell(text)
        shown = capsys.readouterr()
        return result, shown.out + shown.err

    return run


METRICS = {
    "seconds": (0.01, "s"),
    "rss": (3e8, "B"),
    "rss_before": (3e8, "B"),
    "anon_rss": (1.5e8, "B"),
    "anon_rss_before": (1.5e8, "B"),
    "peak_rss": (3.1e8, "B"),
    "groups": (1, "1"),
    "groups_before": (1, "1"),
    "fds": (20, "1"),
    "threads": (8, "1"),
}


@pytest.fixture
def make_run(tmp_path):
    """Make a run with records of every source, as a lab leaves it."""

    def make(*, ranks=2, cycles=3, phases=("create", "talk", "destroy"), more=(), finish=True, fault=None):
        from kit.results import Run

        writer = create_run(tmp_path, "smoke", {"ranks": ranks, "cycles": cycles}, {}, fault=fault)
        clock = 1.8e9
        for cycle in range(cycles):
            for phase in phases:
                clock += 0.02
                for rank in range(ranks):
                    rows = [*((name, value, unit) for name, (value, unit) in METRICS.items()), *more]
                    writer.append(
                        [
                            Row(
                                run=writer.id, lab=writer.lab, cycle=cycle, phase=phase, rank=rank,
                                metric=metric, value=value, unit=unit, time=clock + rank * 1e-3,
                            )
                            for metric, value, unit in rows
                        ]
                    )  # fmt: skip
        if finish:
            writer.finish()
        return Run(writer.dir)

    return make
