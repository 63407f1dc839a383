"""Ranks that meet at the store: who is missing is named, a retry meets, and every rank reads what all report."""

from __future__ import annotations

from typing import Any

import pytest
from torch._C._distributed_c10d import HashStore

from kit.errors import KitError
from kit.megatron import groups, handles


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Any:
    made = HashStore()
    monkeypatch.setattr(handles.state, "store", made)
    monkeypatch.setattr(groups, "_rounds", {})
    return made


def test_a_retry_after_a_meeting_that_timed_out_meets(store: Any) -> None:
    with pytest.raises(KitError, match=r"ranks \[1\] did not arrive within 0.1 s"):
        groups.meet("destroy", 0, 2, 0.1)
    assert not store.check(["kit/destroy/1/0"])  # a late rank must not go on alone
    store.set("kit/destroy/1/1", "")  # it comes now, and waits for the retry
    groups.meet("destroy", 0, 2, 5.0)
    assert store.check(["kit/destroy/1/0"])


def test_every_rank_reads_what_all_report(store: Any) -> None:
    store.set("kit/restore/1/1", "no memory")
    assert groups.reports("restore", "", 0, 2, 5.0) == ["", "no memory"]
    store.set("kit/restore/2/1", "")
    assert groups.reports("restore", "", 0, 2, 5.0) == ["", ""]


def test_a_snapshot_without_a_default_group_needs_one_to_be_there() -> None:
    with pytest.raises(KitError, match="the default group is gone and this snapshot was taken without it"):
        groups._place(None, None)
