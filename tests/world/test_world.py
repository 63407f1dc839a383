"""A World in daily use: all tests of this file that do not break it share one World."""

from __future__ import annotations

import contextlib
import os
import pickle
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kit.errors import BadInput, KitError, RankDied, RankError
from kit.machine import has_gpu_driver
from kit.world import World, leftovers
from kit.world.asked import check_call


class Seen:
    """An observer that records what ranks print."""

    def __init__(self) -> None:
        self.lines: list[tuple[int, str]] = []
        self.phases: list[str] = []

    def started(self, phase: str, ranks: object) -> None:
        self.phases.append(phase)

    def output(self, rank: int, text: str) -> None:
        self.lines += [(rank, line) for line in text.split("\n")]

    def tick(self, answered: object) -> None: ...

    def ended(self) -> None: ...


@pytest.fixture(scope="module")
def seen() -> Seen:
    return Seen()


@pytest.fixture(scope="module")
def world(seen: Seen, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with World(2, logs=tmp_path_factory.mktemp("logs"), observer=seen) as made:
        yield made


def test_ranks_reduce_and_names_persist(world: World) -> None:
    world.run("x = torch.ones(1) * (rank + 1); dist.all_reduce(x)")
    assert world.eval("x.item()") == [3.0, 3.0]
    assert world.eval("[rank, world_size, str(device)]") == [[0, 2, "cpu"], [1, 2, "cpu"]]


def test_a_group_that_will_not_say_how_far_it_is_hides_nothing(world: World) -> None:
    """Such as a group with a suspended communicator; a stand-in is registered here."""
    world.run(
        "from kit.errors import KitError\n"
        "class Asleep:\n"
        "    def _get_sequence_number_for_group(self): raise KitError('suspended')\n"
        "asleep = Asleep()\n"
        "dist.distributed_c10d._world.pg_names[asleep] = 'asleep'"
    )
    try:
        assert world.stacks() == {0: "idle", 1: "idle"}
        assert world.stacks() == {0: "idle", 1: "idle"}  # the side thread survived the first call
    finally:
        world.run("del dist.distributed_c10d._world.pg_names[asleep]")


def test_some_ranks_only(world: World) -> None:
    world.run("mine = 'set'", ranks=[1])
    assert world.eval("'mine' in globals()") == [False, True]
    assert world.eval("rank", ranks=[1]) == [1]


@pytest.mark.parametrize("ranks", [[2], [-1], [], [True], ["0"], 1, "0"])
def test_ranks_that_do_not_exist_are_refused(world: World, ranks: Any) -> None:
    with pytest.raises(BadInput, match="0 to 1"):
        world.run("1", ranks=ranks)


def test_ranks_may_be_named_by_anything_that_gives_them(world: World) -> None:
    assert world.eval("rank", ranks=range(1, 2)) == [1]
    assert world.eval("rank", ranks=(rank for rank in (0, 1))) == [0, 1]


def test_code_that_is_no_text_is_refused(world: World) -> None:
    for call in (world.run, world.eval):
        with pytest.raises(BadInput, match="code for the ranks is text, not"):
            call(print)  # type: ignore[operator]


def test_call_takes_and_gives_json(world: World) -> None:
    assert world.call("json:dumps", obj={"a": [1, None]}) == ['{"a": [1, null]}'] * 2


def test_call_names_what_is_wrong(world: World) -> None:
    with pytest.raises(BadInput, match=r"package\.module:function"):
        world.call("no_colon")
    with pytest.raises(BadInput, match="JSON"):
        world.call("json:dumps", obj=object())
    with pytest.raises(RankError, match="no_such_module"):
        world.call("no_such_module:f")
    with pytest.raises(RankError, match="not JSON serializable; it must be numbers") as refused:
        world.eval("object()")
    assert "json" not in refused.value.traceback  # the kit's own sending code would not help the user
    assert world.eval("1") == [1, 1]


STRANGE = {
    "an error without words": "class Mute(Exception):\n    def __str__(self): return str(1 / 0)\nraise Mute()",
    "a value too deep to send": "deep = []\nfor _ in range(100_000): deep = [deep]",
    "no stdout": "import sys; sys.stdout.close()",
    "another stdout": "import sys; sys.stdout = object()",
}


@pytest.mark.parametrize("code", STRANGE.values(), ids=STRANGE)
def test_strange_things_do_not_end_a_rank(world: World, code: str) -> None:
    pids = world.pids
    with contextlib.suppress(RankError):
        world.run(code)
    with contextlib.suppress(RankError):
        world.eval("deep")
    assert world.eval("rank") == [0, 1]
    assert world.pids == pids
    world.restart()  # give the ranks their own stdout


def test_a_result_too_big_for_the_channel_is_an_error_not_the_end(world: World) -> None:
    with pytest.raises(RankError, match="MiB of JSON do not fit"):
        world.eval("'x' * (65 * 2**20) if rank == 1 else ''")
    assert world.eval("rank") == [0, 1]


def test_values_of_the_last_line(world: World) -> None:
    assert world.cell("y = rank * 2\ny + 1") == ["1", "3"]
    assert world.cell("y = 1") == [None, None]
    assert world.cell("y;") == [None, None]
    shown = world.cell("'z' * 100_000")[0]
    assert shown is not None
    assert len(shown) < 11_000


def test_a_typo_is_reported_before_any_rank_sees_it(world: World, seen: Seen) -> None:
    calls = len(seen.phases)
    with pytest.raises(SyntaxError):
        world.run("x = = 1")
    assert len(seen.phases) == calls


def test_output_comes_in_whole_lines_marked_by_rank_and_is_in_the_log(world: World, seen: Seen) -> None:
    seen.lines.clear()
    world.run(
        "for i in range(50): print(f'line {i} of', rank)\nprint('no newline', end='')\nimport os\n_ = os.system('echo from C')"
    )
    for rank in (0, 1):
        mine = [line for r, line in seen.lines if r == rank]
        assert mine[:50] == [f"line {i} of {rank}" for i in range(50)]
        assert any("from C" in line for line in mine)
        assert any("no newline" in line for line in mine)
        assert f"line 49 of {rank}" in (world.logs / f"rank{rank}.log").read_text()


def test_output_streams_while_the_cell_runs(world: World, seen: Seen, tmp_path: Path) -> None:
    """Rank 0 continues only after its output has been shown."""
    gate = tmp_path / "gate"

    class Opens(Seen):
        def output(self, rank: int, text: str) -> None:
            super().output(rank, text)
            if "waiting" in text:
                gate.touch()

    world.observer = opens = Opens()
    try:
        world.run(
            f"import os, time\nprint('waiting')\nwhile not os.path.exists({str(gate)!r}): time.sleep(0.01)",
            timeout_s=20,
        )
    finally:
        world.observer = seen
    assert (0, "waiting") in opens.lines


def test_an_exception_is_one_traceback_with_the_cells_source(world: World) -> None:
    with pytest.raises(RankError) as info:
        world.run("def f(n):\n    return 1 / n\nf(0)")
    error = info.value
    assert error.rank == 0
    assert error.ranks == (0, 1)
    assert error.phase == "run"
    assert str(error).count("Traceback") == 1
    assert "return 1 / n" in error.traceback
    assert "kit/world" not in error.traceback
    assert world.eval("rank") == [0, 1]


def test_at_most_four_tracebacks(tmp_path: Path) -> None:
    with World(6, logs=tmp_path, device="cpu") as six:
        with pytest.raises(RankError) as info:
            six.run("raise ValueError(f'mine is {rank}')")
        assert str(info.value).count("Traceback") == 4
        assert "2 other tracebacks" in str(info.value)
        assert six.eval("rank") == list(range(6))


def test_what_a_cell_defines_can_be_pickled_among_ranks(world: World) -> None:
    world.run(
        "class Thing:\n    def __init__(self, n): self.n = n\nout = [None, None]\ndist.all_gather_object(out, Thing(rank))"
    )
    assert world.eval("[t.n for t in out]") == [[0, 1], [0, 1]]


def test_restart_gives_fresh_processes_and_empty_names(world: World) -> None:
    world.run("left = 1")
    before = world.pids
    world.restart()
    assert not set(before) & set(world.pids)
    assert world.eval("'left' in globals()") == [False, False]
    assert world.eval("dist.get_world_size()") == [2, 2]


def test_repr_shows_ranks_pids_device_and_phase(world: World) -> None:
    text, page = repr(world), world._repr_html_()
    for pid in world.pids:
        assert str(pid) in text
        assert str(pid) in page
    assert "cpu" in text
    assert "idle" in text


def test_close_is_idempotent_and_a_closed_world_says_so(tmp_path: Path, nothing_left: None) -> None:
    closed = World(1, logs=tmp_path)
    closed.close()
    closed.close()
    assert "closed" in repr(closed)
    with pytest.raises(KitError, match="closed"):
        closed.run("1")


def test_logs_that_nobody_asked_for_end_with_the_world(nothing_left: None) -> None:
    with World(1, device="cpu") as one:
        one.run("print('hello')")
        assert "hello" in (one.logs / "rank0.log").read_text()
    assert not one.logs.exists()


def test_two_worlds_at_once(world: World, tmp_path: Path, nothing_left: None) -> None:
    with World(2, logs=tmp_path) as other:
        world.run("where = 'first'")
        other.run("where = 'second'; t = torch.ones(1); dist.all_reduce(t)")
        assert world.eval("where") == ["first"] * 2
        assert other.eval("[where, t.item()]") == [["second", 2.0]] * 2


def test_calls_from_two_threads_take_turns(world: World) -> None:
    results: dict[int, object] = {}

    def work(n: int) -> None:
        results[n] = [world.eval(f"{n} + rank") for _ in range(20)]

    threads = [threading.Thread(target=work, args=(n,)) for n in (10, 20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {10: [[10, 11]] * 20, 20: [[20, 21]] * 20}


def test_everything_listens_on_loopback_only(world: World) -> None:
    """Check every listening TCP socket of torchrun and the ranks: torchrun's store and gloo's pairs."""
    for pid in [world.torchrun_pid, *world.pids]:
        inodes = {
            os.readlink(fd)[8:-1] for fd in Path(f"/proc/{pid}/fd").iterdir() if os.readlink(fd).startswith("socket:")
        }
        for table, loopback in (("tcp", "0100007F"), ("tcp6", "00000000000000000000000001000000")):
            for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == "0A" and fields[9] in inodes:
                    assert fields[1].split(":")[0] in {loopback, "0000000000000000FFFF00000100007F"}, line


def test_the_folder_is_owner_only_and_holds_no_key(world: World) -> None:
    folder = next(path for path in leftovers.base().iterdir() if path.name.startswith(world._crew.id))
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert not (folder / "key").exists()
    assert not (folder / "s").exists()  # no other machine is expected, so nothing listens
    for pid in world.pids:
        assert b"KIT_KEY" not in Path(f"/proc/{pid}/environ").read_bytes()


def test_the_notebook_side_does_not_import_torch() -> None:
    code = "import sys; from kit.world import World; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"ranks": 0}, "ranks must be a whole number of at least 1, not 0"),
        ({"ranks": 2.0}, "ranks must be a whole number"),
        ({"ranks": True}, "ranks must be a whole number"),
        ({"ranks": 100_000}, "at most"),
        ({"device": "tpu"}, "device must be one of auto, cpu, cuda"),
        ({"timeout_s": 0}, "timeout_s must be a number of seconds above 0"),
        ({"timeout_s": float("nan")}, "timeout_s must be"),
        ({"python": "/nowhere/python"}, "python= names /nowhere/python, which does not run"),
        ({"env": {"A": 1}}, "env must map names to strings"),
        ({"env": ["A=1"]}, "env must map names to strings"),
        ({"preload": "numpy"}, "preload is a list of modules' names"),
        ({"preload": 3}, "preload is a list of modules' names"),
        ({"ranks": 3, "nodes": 2, "endpoint": "h:1"}, "3 ranks cannot be spread evenly over 2 nodes"),
        ({"nodes": 2}, "endpoint='host:port'"),
        ({"endpoint": "h:1"}, "endpoint= is for several nodes"),
        ({"logs": "/proc/nowhere"}, "cannot be written"),
        ({"logs": 5}, "logs must be the path of a folder, not 5"),
        ({"logs": ""}, "logs must be the path of a folder"),
        ({"python": 5}, "python must be the path of a Python, not 5"),
        ({"timeout_s": 10**400}, "at most 2000000, not 1000"),
        ({"timeout_s": 10**5000}, "at most 2000000, not a number with thousands of digits"),
        ({"timeout_s": 1e300}, "at most 2000000, not 1e+300"),
        ({"start_timeout_s": float("nan")}, "start_timeout_s must be a number of seconds"),
        ({"start_timeout_s": "x"}, "start_timeout_s must be a number of seconds"),
        ({"start_timeout_s": 0}, "start_timeout_s must be a number of seconds"),
        ({"nodes": 2, "endpoint": "no.such.host.invalid:1"}, "where this machine cannot listen"),
        ({"nodes": 2, "endpoint": f"{'x' * 300}:1"}, "where this machine cannot listen"),
        ({"nodes": 2, "endpoint": "192.0.2.1:1"}, "where this machine cannot listen: Cannot assign requested address"),
        ({"ranks": 10**400}, "at most"),
    ],
)
def test_bad_input_is_one_sentence_before_anything_starts(
    arguments: dict[str, object], sentence: str, nothing_left: None
) -> None:
    with pytest.raises(BadInput) as info:
        World(**arguments)  # type: ignore[arg-type]
    assert sentence in str(info.value)
    assert "\n" not in str(info.value)


def test_a_rank_that_dies_before_it_joins_is_named_in_three_lines(tmp_path: Path, nothing_left: None) -> None:
    dying = "import os, signal\nos.register_at_fork(after_in_child=lambda: os.kill(os.getpid(), signal.SIGKILL))"
    (tmp_path / "dying.py").write_text(dying)
    with pytest.raises(
        RankDied, match=r"^rank 0 was killed by SIGKILL before it joined; .*last lines:\n.*\n.*$"
    ) as info:
        World(1, device="cpu", env={"PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}, preload=["dying"])
    assert (info.value.rank, info.value.signal) == (0, "SIGKILL")


@pytest.mark.parametrize("target", ["math", "math:", ":sqrt", print])
def test_a_function_is_called_by_its_name(target: Any) -> None:
    with pytest.raises(BadInput, match=r"a function is named 'package\.module:function', not"):
        check_call(target, None, {})


@pytest.mark.skipif(has_gpu_driver(), reason="this machine has a GPU driver")
def test_cuda_without_a_driver_is_refused() -> None:
    with pytest.raises(BadInput, match="needs a GPU driver"):
        World(2, device="cuda")


def test_what_torch_leaves_in_shared_memory_goes_with_its_rank(tmp_path: Path, nothing_left: None) -> None:
    """torch's shared CUDA memory counters; a file with such a name stands in, since no GPU is needed."""
    make = "import os; open(f'/dev/shm/torch_{os.getpid()}_1_0', 'w').close()"
    with World(1, logs=tmp_path) as one:
        for _ in range(2):
            one.run(make)
            left = Path(f"/dev/shm/torch_{one.pids[0]}_1_0")
            assert left.exists()
            one.restart()
            assert not left.exists()
        one.run(make)


def test_what_cannot_be_removed_from_shared_memory_keeps_nobody_from_ending() -> None:
    """In a /dev/shm shared between containers, a file of that name may belong to another user; here a folder stands in."""
    name = Path(f"/dev/shm/torch_{os.getpid()}_0")
    name.mkdir()
    try:
        leftovers.forget_shared([os.getpid()])
        assert name.exists()
    finally:
        name.rmdir()


def test_env_reaches_the_ranks_and_the_notebooks_plotting_backend_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MPLBACKEND", "module://of_the_notebook")
    with World(1, logs=tmp_path, env={"MY_SETTING": "7"}) as one:
        assert one.eval("__import__('os').environ.get('MY_SETTING')") == ["7"]
        assert one.eval("__import__('os').environ.get('MPLBACKEND')") == [None]


def test_results_of_ranks_are_never_unpickled(world: World) -> None:
    """Ranks send JSON; a pickle arrives as plain text."""
    text = pickle.dumps(print, protocol=0).decode()
    assert world.eval(repr(text)) == [text, text]


SLOW_FORKS = """
import os, time
from pathlib import Path

HERE = Path(__file__).parent

def forked():
    (HERE / "forked").open("a").write(f"{time.time()}\\n")
    time.sleep(0.3)

from kit.world import rankside
plain = rankside.TCPStore

def store(*args, **kwargs):
    (HERE / "called").open("a").write(f"{time.time()}\\n")
    return plain(*args, **kwargs)

if os.environ.get("RANK") is None:
    os.register_at_fork(after_in_parent=forked)
    rankside.TCPStore = store
"""


def test_no_rank_calls_the_store_while_others_are_being_forked(tmp_path: Path) -> None:
    """The store's server runs in the process that forks: a lock that its thread holds during a fork stays locked in the new rank."""
    (tmp_path / "slow_forks.py").write_text(SLOW_FORKS)
    with World(3, logs=tmp_path / "logs", env={"PYTHONPATH": str(tmp_path)}, preload=["slow_forks"]) as world:
        assert world.eval("rank") == [0, 1, 2]
    forked, called = ([float(line) for line in (tmp_path / name).read_text().split()] for name in ("forked", "called"))
    assert len(forked) >= 3
    assert len(called) == 3
    assert min(called) > max(forked)


def test_a_walk_over_all_objects_finds_what_was_imported_before_the_ranks(tmp_path: Path) -> None:
    with World(1, logs=tmp_path / "logs") as world:
        world.run("import gc, torch")
        assert world.eval("any(holder is vars(torch) for holder in gc.get_referrers(torch.nn))") == [True]
