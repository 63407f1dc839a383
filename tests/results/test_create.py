from __future__ import annotations

import errno
import json
import os
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import kit
from kit.errors import BadInput
from kit.results import Run, create_run, runs_dir
from kit.results.records import output_file


def test_a_run_goes_from_running_to_finished(tmp_path, record):
    writer = create_run(tmp_path / "runs", "smoke", {"cycles": 2}, {"early": 1}, fault="leaked-group")
    assert re.fullmatch(r"smoke-\d{8}-\d{6}-[0-9a-f]{4}", writer.id)
    assert writer.dir == tmp_path / "runs" / writer.id
    assert (writer.dir / "logs").is_dir()
    run = Run(writer.dir)
    assert (run.status, run.partial, run.fault) == ("running", True, "leaked-group")
    writer.set_provenance({"late": 2})
    writer.append([record(run=writer.id)])
    writer.finish()
    assert (run.status, run.partial, run.provenance) == ("finished", False, {"late": 2})
    info = json.loads((writer.dir / "run.json").read_text())
    assert set(info) == {
        *(
            "run",
            "lab",
            "config",
            "status",
            "owner",
            "started",
            "finished",
            "fault",
            "error",
            "provenance",
            "kit",
            "schema",
            "sealed",
        )
    }
    assert info["finished"] >= info["started"]
    assert sorted(path.name for path in writer.dir.iterdir()) == ["logs", "records.jsonl", "run.json"]


@pytest.mark.parametrize("there", [(), ("run",)])
def test_a_run_that_a_full_disk_stops_at_its_start_leaves_what_was_there(tmp_path, monkeypatch, there):
    def full(path: Path, _: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    for name in there:
        (tmp_path / name).mkdir()
    monkeypatch.setattr("kit.results.run.rewrite_json", full)
    with pytest.raises(BadInput, match="No space left on device"):
        create_run(tmp_path, "smoke", {}, {}, out=tmp_path / "run")
    assert {*tmp_path.rglob("*")} == {tmp_path / name for name in there}


def test_a_failed_run_says_why(tmp_path):
    writer = create_run(tmp_path, "smoke", {}, {})
    writer.finish("rank 1 died in reload: SIGKILL")
    run = Run(writer.dir)
    assert (run.status, run.error) == ("failed", "rank 1 died in reload: SIGKILL")
    assert run.notes == ["the run failed: rank 1 died in reload: SIGKILL"]


def test_runs_made_in_the_same_second_do_not_collide(tmp_path):
    assert len({create_run(tmp_path, "smoke", {}, {}).dir for _ in range(50)}) == 50


def test_out_is_the_folder_itself_and_never_taken_twice(tmp_path):
    out = tmp_path / "deep" / "mine"
    assert create_run(tmp_path, "smoke", {}, {}, out=out).dir == out
    with pytest.raises(BadInput, match="already holds a run"):
        create_run(tmp_path, "smoke", {}, {}, out=out)


@pytest.mark.parametrize("name", ["notes.txt", ".hidden", "logs/"])
def test_a_folder_with_files_of_a_person_is_refused_and_stays_as_it_is(tmp_path, name):
    out = tmp_path / "mine"
    out.mkdir(mode=0o755)
    (out / name).mkdir() if name.endswith("/") else (out / name).touch()
    with pytest.raises(BadInput) as caught:
        create_run(tmp_path, "smoke", {}, {}, out=out)
    assert str(caught.value) == f"{out} is not empty; choose a new folder or an empty one"
    assert [*out.iterdir()] == [out / name]
    assert out.stat().st_mode & 0o777 == 0o755


def test_the_folder_of_a_run_is_its_owners_only_unless_it_was_there(tmp_path):
    (there := tmp_path / "there").mkdir(mode=0o750)
    for out, mode in ((None, 0o700), (tmp_path / "new", 0o700), (there, 0o750)):
        assert create_run(tmp_path, "smoke", {}, {}, out=out).dir.stat().st_mode & 0o777 == mode


def test_of_several_runs_that_begin_in_one_folder_one_gets_it(tmp_path):
    for attempt in range(40):
        out, start = tmp_path / str(attempt), threading.Barrier(2)

        def begin(out=out, start=start):
            start.wait()
            try:
                return str(create_run(tmp_path, "smoke", {}, {}, out=out).dir)
            except BadInput as error:
                return str(error)

        with ThreadPoolExecutor(2) as pool:
            answers = [future.result() for future in [pool.submit(begin) for _ in range(2)]]
        assert sorted(answers) == [str(out), f"{out} already holds a run; choose another folder"]


def test_a_place_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file", tmp_path / "file" / "runs"):
        with pytest.raises(BadInput, match="cannot make a run folder"):
            create_run(place, "smoke", {}, {})
    with pytest.raises(BadInput, match="is a file"):
        create_run(tmp_path, "smoke", {}, {}, out=tmp_path / "file")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_folder_is_refused(tmp_path):
    tmp_path.chmod(0o555)
    try:
        for out in (None, tmp_path):
            with pytest.raises(BadInput, match="Permission denied"):
                create_run(tmp_path, "smoke", {}, {}, out=out)
    finally:
        tmp_path.chmod(0o755)


def test_a_file_in_a_folder_that_takes_none_is_refused_before_the_run():
    with pytest.raises(BadInput, match=r"cannot write /proc/checks.xml: its folder takes no file"):  # not even of root
        output_file("/proc/checks.xml")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_file_in_a_read_only_folder_is_refused_before_the_run(tmp_path):
    run = Run(create_run(tmp_path, "smoke", {}, {}).dir)
    run.dir.chmod(0o500)
    with pytest.raises(BadInput, match="its folder takes no file"):
        run.label = "mine"
    with pytest.raises(BadInput, match="its folder takes no file"):
        output_file(run.dir / "checks.xml")
    run.dir.chmod(0o700)


def test_runs_dir_is_the_environments_word_else_beside_pyproject(tmp_path, monkeypatch):
    monkeypatch.setenv("KIT_RUNS", str(tmp_path / "x"))
    assert runs_dir() == tmp_path / "x"
    monkeypatch.delenv("KIT_RUNS")
    monkeypatch.chdir(tmp_path)
    chosen = runs_dir()
    assert chosen.name == "runs"
    assert (chosen.parent / "kit" / "__init__.py").samefile(kit.__file__)
