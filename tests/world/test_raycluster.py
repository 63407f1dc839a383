"""Ranks as actors of Ray: what needs no Ray. tests/faults/test_ray.py has the rest."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

import kit
from kit.errors import BadInput
from kit.labs.discover import complaints, find
from kit.world import World, asked, launch
from kit.world.launch import RAYLAUNCH, Launched
from kit.world.raycluster import ClusterFacts, order_of

HERE = ClusterFacts(address="10.0.0.1:6379", joined=True, gpus=0.0, auth="")


def needs(facts: ClusterFacts, neighbours: int, device: str) -> object:
    return order_of(facts, ranks=1, neighbours=neighbours, device=device)["needs"]


def test_in_a_cluster_that_was_there_an_actor_takes_a_cpu_and_its_part_of_the_gpus() -> None:
    assert needs(HERE, 3, "auto") == {"CPU": 1.0}
    gpus = HERE._replace(gpus=2.0)
    assert needs(gpus, 1, "auto") == {"CPU": 1.0, "GPU": 2.0}
    assert needs(gpus, 3, "cuda") == {"CPU": 1.0, "GPU": 0.666}  # three of them fit into two
    assert needs(gpus, 3, "cpu") == {"CPU": 1.0}
    assert needs(gpus._replace(joined=False), 3, "auto") == {}  # it was started for these ranks, and is small


def test_an_engine_that_cannot_be_is_refused_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BadInput, match=r"^engine must be one of torchrun, ray, not 'mpi'$"):
        World(2, engine="mpi")
    with pytest.raises(BadInput, match=r"^engine='ray' starts ranks on this machine, and nodes=2; use launch='ray'"):
        World(2, nodes=2, endpoint="127.0.0.1:4000", engine="ray")
    monkeypatch.setattr(asked, "has_ray", lambda _: False)
    said = rf"^engine='ray' needs Ray in the ranks' Python: {sys.executable} -m pip install ray$"
    with pytest.raises(BadInput, match=said):
        World(2, engine="ray", python=sys.executable)
    with pytest.raises(BadInput, match=said):
        kit.lab("smoke", engine="ray", python=sys.executable)


@pytest.mark.skipif(importlib.util.find_spec("ray") is not None, reason="Ray is here")
def test_without_ray_the_python_of_the_ranks_is_found_to_lack_it() -> None:
    assert not asked.has_ray(sys.executable)


def test_what_a_lab_cannot_do_with_ray_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asked, "has_ray", lambda _: True)
    monkeypatch.setattr(sys.modules["__main__"], "Mine", lambda settings: settings, raising=False)
    own = {"engine": "ray", "implementation": "__main__:Mine"}
    said = complaints(find("stream"), own, None)
    assert said == {
        "engine": "engine=ray runs the controller in another process: implementation=__main__:Mine is code of this notebook; "
        "write it to a module"
    }
    assert complaints(find("bench-world"), {"engine": "ray"}, None) == {
        "engine": "engine=ray is not possible here: lab 'bench-world' has no ranks; leave engine=torchrun"
    }
    assert complaints(find("smoke"), {"engine": "ray"}, None) == {}


def test_a_launch_by_ray_that_lost_its_agent_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its last words say why the machine is lost. Another launch, such as ssh, may go on for long, and is not waited for."""
    monkeypatch.setattr(launch, "LAST_WORDS_S", 60.0)
    log = tmp_path / "machine1.log"
    ending = f"read key; : {RAYLAUNCH} {{command}}; sleep 0.3; echo Ray lost the task of an agent; exit 1"
    lost = Launched.start([1], ending, ["true"], b"key", log)
    assert lost.failure("") == ""  # it runs
    said = "the launch of machine 1 exited with status 1: Ray lost the task of an agent"
    assert lost.failure("", lost=True) == said
    assert lost.failure(" before its agent joined") == said.replace(":", " before its agent joined:")
    by_ssh = Launched.start([2], "read key; : {command}; exec sleep 60", ["true"], b"key", tmp_path / "machine2.log")
    assert by_ssh.failure("", lost=True) == ""
    by_ssh.process.kill()
    by_ssh.end(60)


def test_notes_of_a_launch_are_printed_without_their_mark(tmp_path: Path) -> None:
    note = "there is no Ray cluster here: this machine plays machine 1"
    lines = f"read key; echo waiting; echo 'note: {note}'; : {{command}}"
    launched = Launched.start([1], lines, ["true"], b"key", tmp_path / "log")
    launched.end(60)
    assert launched.notes() == [note]
