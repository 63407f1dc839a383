"""The contract of destroy and reload: no-op calls, what is refused, and what common alternatives leak."""

from types import SimpleNamespace

import pytest

from kit.megatron import groups


@pytest.fixture(scope="module")
def ranks(launch):
    return launch("contract", 2)


def test_not_initialised_means_nothing_to_do(ranks):
    for rank in ranks:
        seen = rank["uninitialised"]
        assert seen["snapshot"] == {}
        assert seen["destroy"]["initialised"] is False
        assert seen["destroy"]["snapshot"] == {}
        assert seen["destroy"]["destroyed"] == 0


def test_bad_input_is_a_value_error_in_one_sentence(ranks):
    for rank in ranks:
        seen = rank["uninitialised"]
        assert seen["errors_are_value_errors"]
        assert "the snapshot is empty" in seen["empty"]
        assert "mode 'hard' is unknown: choose one of exact, abort, manual, official, suspend" in seen["mode"]
        assert "include_world is not allowed with mode 'manual'" in seen["world"]


def test_ranks_order_timeouts_and_descriptions_come_back(ranks):
    for rank in ranks:
        seen = rank["options"]
        assert seen["before"] == seen["after"]
        assert seen["tp_minutes"] == 7
        minutes = {group["timeout_s"] / 60 for group in seen["after"]["groups"]}
        assert {7, 120} <= minutes
        assert seen["before"]["init_arguments"]["order"] == "tp-cp-ep-pp-dp"


@pytest.mark.parametrize("word", ["shutdown", "abort"])
def test_a_group_that_cannot_be_destroyed_is_named_after_the_rest_was(ranks, word):
    for rank in ranks:
        seen = rank["failure"][word]
        assert len(seen["held"]) == 1
        assert "TENSOR_MODEL_PARALLEL_GROUP" in seen["error"]
        assert f"{word}: the wire is cut" in seen["error"]
        assert seen["destroyed"] >= 18
        assert seen["census"]["groups"] == 2  # the default group and the bystander


def test_a_rank_that_does_not_come_is_named(ranks):
    assert "ranks [1] did not arrive within 2 s" in ranks[0]["missing"]


def test_official_frees_no_device_group(ranks):
    for rank in ranks:
        seen = rank["common"]["official"]
        steps = [after - before for before, after in zip(seen["counts"], seen["counts"][1:], strict=False)]
        assert seen["destroyed"] == -1
        assert min(steps) >= 15
        assert seen["dead"] == 0  # the layers' old groups are still registered beside the new ones
        assert seen["stale"] > 20
        assert seen["talk"]


def test_manual_loses_the_gloo_groups(ranks):
    for rank in ranks:
        seen = rank["common"]["manual"]
        steps = [after - before for before, after in zip(seen["counts"], seen["counts"][1:], strict=False)]
        assert steps == [3, 3, 3]
        assert seen["destroyed"] >= 15
        assert seen["dead"] > 20
        assert seen["stale"] == seen["dead"]


def test_groups_of_others_are_untouched(ranks):
    for rank in ranks:
        assert rank["bystander"] == ""


def test_groups_made_before_the_handles_are_refused_by_name(ranks):
    for rank in ranks:
        assert "TENSOR_MODEL_PARALLEL_GROUP" in rank["late"]
        assert "install" in rank["late"]


def test_uninstall_gives_the_default_group_its_place_back(ranks):
    for rank in ranks:
        assert rank["world_is_plain_again"]
        assert rank["early_world"] == ""


class Communicator:
    """What torch shows of NCCL's part in a group, which may never have been used."""

    def __init__(self, *, used):
        self.used, self.suspended = used, False

    def memory_stats(self):
        if not self.used:
            raise RuntimeError("NCCL communicator is not initialized")
        return {"suspend": 4, "persist": 1, "total": 5, "suspended": int(self.suspended)}

    def suspend(self):
        self.suspended = True


def group_of(name, backend):
    return SimpleNamespace(kit_facts={"description": name, "name": name, "ranks": [0]}, kit_inner=name, backend=backend)


@pytest.mark.parametrize("include_world", [False, True])
def test_one_group_that_is_skipped_does_not_end_the_suspension(monkeypatch, include_world):
    world = group_of("world", Communicator(used=True))
    backends = {
        "gloo": None,
        "first": Communicator(used=True),
        "unused": Communicator(used=False),
        "last": Communicator(used=True),
    }
    others = [group_of(name, backend) for name, backend in backends.items()]
    monkeypatch.setattr(groups, "c10d", SimpleNamespace(_world=SimpleNamespace(default_pg=world)))
    monkeypatch.setattr(groups, "dist", SimpleNamespace(get_rank=lambda: 0, get_world_size=lambda: 1))
    monkeypatch.setattr(groups, "megatron_groups", lambda: others)
    monkeypatch.setattr(groups, "meet", lambda *_: None)
    monkeypatch.setattr(groups, "nccl_backend", lambda group: group.backend)
    monkeypatch.setattr(groups, "asleep", [])
    kept = groups.suspend(include_world=include_world, timeout_s=1.0)
    wanted = [*["world"][:include_world], "first", "last"]
    assert [inner for _, inner in groups.asleep] == wanted
    assert [group["group"].split()[0] for group in kept["suspended"]] == wanted
    assert [name.split()[0] for name, _ in kept["skipped"]] == ["gloo", "unused"]
    assert kept["failed"] == []


def test_a_function_that_megatron_was_initialised_with_is_given_to_it_again(monkeypatch):
    """A snapshot is plain JSON, so it has no functions."""
    again = []

    def ranks_of(ranks):
        return ranks

    monkeypatch.setattr(groups, "initialised", lambda: False)
    monkeypatch.setattr(groups.state, "init_arguments", {"order": "tp-dp", "get_embedding_ranks": ranks_of})
    monkeypatch.setattr(
        groups, "parallel_state", lambda: SimpleNamespace(initialize_model_parallel=lambda **given: again.append(given))
    )
    groups.reload({"mode": "manual", "init_arguments": {"order": "tp-dp"}, "groups": []})
    assert again == [{"order": "tp-dp", "get_embedding_ranks": ranks_of}]


def test_by_hand_each_group_is_destroyed_once_and_those_that_cannot_be_are_named(monkeypatch):
    tried, reset = [], []

    def destroy(group):
        tried.append(group)
        if group == "pipeline":
            raise RuntimeError("the wire is cut")

    module = SimpleNamespace(
        _TENSOR_GROUP="tensor",
        _MODEL_GROUP="tensor",  # the same group under another name
        _DATA_GROUP_GLOO="data over gloo",
        _PIPELINE_GROUP="pipeline",
        destroy_model_parallel=lambda: reset.append(True),
    )
    monkeypatch.setattr(groups, "parallel_state", lambda: module)
    monkeypatch.setattr(groups, "groups_in", lambda value: [value])
    monkeypatch.setattr(groups, "dist", SimpleNamespace(destroy_process_group=destroy))
    assert groups._manual() == (1, [("_PIPELINE_GROUP", "the wire is cut")])
    assert (tried, reset) == (["tensor", "pipeline"], [True])
    assert {module._TENSOR_GROUP, module._DATA_GROUP_GLOO} == {None}
