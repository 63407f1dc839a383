"""Limits are found in both versions of control groups, at whatever level they are set."""

import ctypes
import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kit import machine
from kit.machine import cgroup_limits, free_memory, ptrace_scope


@pytest.fixture
def tree(tmp_path):
    """Lay out a process whose /proc files name control groups under tmp_path."""
    proc, mount = tmp_path / "proc", tmp_path / "cgroup"
    proc.mkdir()

    def lay(cgroup, mounts, files):
        (proc / "cgroup").write_text(cgroup)
        (proc / "mountinfo").write_text(
            "".join(
                f"30 23 0:28 {root} {mount / at} rw,relatime shared:1 - {kind} {kind} {options}\n"
                for root, at, kind, options in mounts
            )
        )
        for name, text in files.items():
            (mount / name).parent.mkdir(parents=True, exist_ok=True)
            (mount / name).write_text(f"{text}\n")
        return cgroup_limits(proc)

    return lay


V2 = [("/", "", "cgroup2", "rw")]


def test_version_2_tells_the_level_with_the_least_room(tree):
    files = {
        "pod/memory.max": 4000,
        "pod/memory.current": 3500,
        "pod/box/memory.max": 3000,
        "pod/box/memory.current": 100,
        "pod/box/pids.max": "max",
        "pod/box/pids.current": 5,
        "pod/pids.max": 64,
        "pod/pids.current": 9,
    }
    limits = tree("0::/pod/box\n", V2, files)
    assert limits == {"version": 2, "memory_max": 4000, "memory_used": 3500, "pids_max": 64, "pids_used": 9}


def test_version_1_has_a_hierarchy_for_each_controller_and_a_number_for_no_limit(tree):
    mounts = [
        ("/", "memory", "cgroup", "rw,memory"),
        ("/", "pids", "cgroup", "rw,pids"),
        *[("/", "u", "cgroup2", "rw")],
    ]
    files = {
        "memory/a/memory.limit_in_bytes": 9223372036854771712,
        "memory/a/memory.usage_in_bytes": 7,
        "pids/a/pids.max": 32,
        "pids/a/pids.current": 2,
    }
    limits = tree("5:pids:/a\n4:memory:/a\n0::/\n", mounts, files)
    assert limits == {"version": 1, "memory_max": None, "memory_used": None, "pids_max": 32, "pids_used": 2}


def test_inside_a_container_the_mount_stands_for_a_path_it_does_not_show(tree):
    mounts = [("/docker/f00", "memory", "cgroup", "rw,memory")]
    files = {"memory/memory.limit_in_bytes": 500, "memory/memory.usage_in_bytes": 1}
    for path in ("/docker/f00", "/elsewhere", "/../other"):
        assert tree(f"4:memory:{path}\n", mounts, files)["memory_max"] == 500


def test_no_control_groups_at_all(tmp_path):
    assert set(cgroup_limits(tmp_path).values()) == {None}


def test_this_machine_answers():
    limits = cgroup_limits()
    assert limits["version"] in (1, 2, None)
    assert limits["memory_max"] is None or limits["memory_max"] > 1 << 20


@pytest.mark.parametrize(
    ("stat", "available_kib", "expected"),
    [
        ({}, 100, 2400),
        ({"pod/memory.stat": "anon 9\ninactive_file 1000"}, 100, 3000),  # now another level has the least free memory
        ({}, 1, 1024),
    ],
)
def test_free_memory_is_the_least_of_machine_and_limits(tree, tmp_path, stat, available_kib, expected):
    files = {
        "pod/memory.max": 5000,
        "pod/memory.current": 2600,
        "pod/box/memory.max": 3100,
        "pod/box/memory.current": 100,
    }
    tree("0::/pod/box\n", V2, files | stat)
    meminfo = tmp_path / "meminfo"
    meminfo.write_text(f"MemTotal: 900 kB\nMemAvailable: {available_kib} kB\n")
    assert free_memory(tmp_path / "proc", meminfo) == expected


def test_free_memory_in_version_1_and_below_nothing(tree, tmp_path):
    files = {"memory/memory.limit_in_bytes": 500, "memory/memory.usage_in_bytes": 900}
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemAvailable: 10 kB\n")
    mounts = [("/", "memory", "cgroup", "rw,memory")]
    tree("5:memory:/\n", mounts, files)
    assert free_memory(tmp_path / "proc", meminfo) == 0
    tree("5:memory:/\n", mounts, {"memory/memory.stat": "inactive_file 3\ntotal_inactive_file 450"})
    assert free_memory(tmp_path / "proc", meminfo) == 50


def test_free_memory_without_control_groups_is_the_machines(tmp_path):
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemAvailable: 10 kB\n")
    assert free_memory(tmp_path, meminfo) == 10240


def test_without_yama_there_is_no_ptrace_scope(tmp_path):
    assert ptrace_scope(tmp_path / "none") is None
    (tmp_path / "scope").write_text("1\n")
    assert ptrace_scope(tmp_path / "scope") == 1


def test_who_holds_the_lock_of_a_file_is_seen_from_outside(tmp_path):
    hold = (
        "import fcntl, sys; f = open(sys.argv[1]); fcntl.flock(f, fcntl.LOCK_EX); print(flush=True); sys.stdin.read()"
    )
    path = tmp_path / "lock"
    path.touch()
    inode = path.stat().st_ino
    assert inode not in machine.file_locks()
    command = [sys.executable, "-c", hold, path]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        holder.stdout.readline()
        assert machine.file_locks()[inode] == {holder.pid}
        assert machine.resident(holder.pid) > 1 << 20
        assert 0 <= machine.cpu_seconds(holder.pid) < 60
        with path.open() as file, pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        holder.stdin.close()
    assert (machine.resident(holder.pid), machine.cpu_seconds(holder.pid)) == (None, None)
    assert inode not in machine.file_locks()


def test_all_threads_run_on_the_cores_that_are_named():
    before = os.sched_getaffinity(0)
    try:
        machine.pin([min(before)])
        tasks = [int(task.name) for task in Path("/proc/self/task").iterdir()]
        assert [os.sched_getaffinity(task) for task in tasks] == [{min(before)}] * len(tasks)
    finally:
        machine.pin(before)
    assert os.sched_getaffinity(0) == before


@pytest.mark.parametrize(
    ("tasks", "ranks", "threads"), [(None, 2, 32), (4096, 2, 32), (100, 2, 25), (100, 16, 3), (100, 80, 1)]
)
def test_ranks_compute_with_their_share_of_the_cores_unless_the_container_may_not_have_so_many_threads(
    monkeypatch: pytest.MonkeyPatch, tasks: int | None, ranks: int, threads: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    monkeypatch.setattr(machine, "cgroup_limit", lambda _: machine.MemoryLimit(tasks, 9, 2))
    monkeypatch.setattr(machine.resource, "getrlimit", lambda _: (machine.resource.RLIM_INFINITY,) * 2)
    assert machine.threads_a_rank(ranks) == threads
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(machine.resource, "getrlimit", lambda _: (64, 64))
    assert machine.threads_a_rank(2) == 16


def test_processor_time_of_a_child_and_of_its_child_is_ones_own() -> None:
    """A grandchild that has ended counts as much as a child that still runs."""
    busy = "import time\nwhile time.process_time() < 0.5: pass\n"
    text = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {busy!r}])\n{busy}print('done', flush=True)\nsys.stdin.read()"
    everything, own = machine.busy_seconds()
    with subprocess.Popen(
        [sys.executable, "-c", text], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout
        assert child.stdout.readline() == "done\n"
        everything_after, own_after = machine.busy_seconds()
        child.communicate(timeout=30)
    assert own_after - own >= 0.9
    assert everything_after - everything >= 0.9


ALLOCATES = """
import ctypes, threading
libc = ctypes.CDLL(None)
libc.malloc.argtypes, libc.malloc.restype = [ctypes.c_size_t], ctypes.c_void_p
together = threading.Barrier(4)  # all at once, so that no thread takes over the arena of one that has ended
threads = [threading.Thread(target=lambda: (libc.malloc(1000), together.wait())) for _ in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
libc.malloc_stats()
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_stats"), reason="this C library does not list its arenas")
@pytest.mark.parametrize("on_rank", [True, False])
def test_threads_of_a_rank_share_one_arena(on_rank):
    environment = machine.defaults_of_ranks(1) if on_rank else {}
    listed = subprocess.run(
        [sys.executable, "-c", ALLOCATES], env=environment, capture_output=True, text=True, timeout=60, check=True
    ).stderr
    assert (listed.count("Arena ") == 1) is on_rank, listed


def test_a_process_that_is_just_starting_its_program_shows_its_mark() -> None:
    """The kernel gives it new memory first and its environment later: read between the two, it is empty."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(os.cpu_count() or 1)]
    seen = []
    try:
        for _ in range(150):
            with subprocess.Popen(["sleep", "60"], env={**os.environ, machine.MARK: "a@b:1:2"}) as started:
                seen.append(machine.marked(started.pid))
                started.kill()
    finally:
        for process in busy:
            process.kill()
            process.wait()
    assert seen == ["a@b:1:2"] * 150


def test_a_process_without_an_environment_has_no_mark() -> None:
    with subprocess.Popen(["sleep", "60"], env={}) as empty:
        assert machine.marked(empty.pid) is None
        empty.kill()
        os.waitid(os.P_PID, empty.pid, os.WEXITED | os.WNOWAIT)
        assert machine.marked(empty.pid) is None  # a zombie's


@pytest.mark.skipif(not Path("/proc/thread-self/schedstat").exists(), reason="this kernel does not count it")
def test_time_in_which_others_had_the_cores_is_counted() -> None:
    core = min(os.sched_getaffinity(0))
    counts = f"""
import os, time
from kit import machine
os.sched_setaffinity(0, [{core}])
before, began = machine.queued_seconds(), time.monotonic()
spent = time.process_time()
while time.process_time() < spent + 0.5:
    pass
print(machine.queued_seconds() - before, time.monotonic() - began)
"""
    busy = subprocess.Popen(
        [sys.executable, "-c", f"import os\nos.sched_setaffinity(0, [{core}])\nwhile True: pass"],
    )
    try:
        done = subprocess.run([sys.executable, "-c", counts], capture_output=True, text=True, check=True, timeout=60)
    finally:
        busy.kill()
        busy.wait()
    queued, took = map(float, done.stdout.split())
    assert queued + 0.5 == pytest.approx(took, rel=0.25)
