"""The checks of a ledger. Each counts violations from the rows alone and names the first; `docs/ledger.md` lists the events.

It does not matter which system wrote the ledger. A check raises `Missing` (null) where the ledger lacks an event that it needs, and names
it. Rows that contradict each other, or lack what others of their kind have, are violations.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kit.stream.history import Ledger, pipelines
from kit.stream.judge.backed import notes_backed
from kit.stream.judge.groups import (
    every_group_once,
    groups_whole,
    order_fair,
    samples_differ,
    tokens_conserved,
    trained_once,
)
from kit.stream.judge.metrics import metrics_true
from kit.stream.judge.permits import capacity_kept, dead_rollout_named, ends_cleanly, permits_return
from kit.stream.judge.resume import resume_equals
from kit.stream.judge.steps import abort_on_failure, one_clear_per_finish, one_step_per_batch, trains_before_straggler
from kit.stream.judge.versions import no_sample_too_old, publish_before_use, stamps_per_token, version_monotone

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kit.results.verdict import Measured

__all__ = ["CHECKS", "Ledger", "pipelines", "resume_equals"]

RULES = (
    no_sample_too_old,
    version_monotone,
    publish_before_use,
    stamps_per_token,
    every_group_once,
    trained_once,
    groups_whole,
    samples_differ,
    order_fair,
    tokens_conserved,
    one_step_per_batch,
    one_clear_per_finish,
    trains_before_straggler,
    abort_on_failure,
    capacity_kept,
    permits_return,
    ends_cleanly,
    dead_rollout_named,
    metrics_true,
    notes_backed,
)
CHECKS: Mapping[str, Callable[[Ledger], Measured]] = {rule.__name__: rule for rule in RULES}
