"""The desk of a run, the kit's or yours, and the limits that it is given."""

from __future__ import annotations

from typing import Any

from kit.labs.share.lab import DESK, ShareConfig
from kit.loop.messages import Command, Event
from kit.loop.runner import Core, made_core
from kit.share.core import limits_note
from kit.share.state import DeskSettings


class Limited:
    """The desk of a run. Its ledger begins with the limits that it was given, in place of what the desk says of them."""

    def __init__(self, config: ShareConfig) -> None:
        self.core: Core[Any] = made_core(config.scheduler, config)
        self.given = limits_note(desk_settings(config), DESK)

    def begin(self) -> tuple[Any, tuple[Command, ...]]:
        state, commands = self.core.begin()
        return state, (self.given, *(command for command in commands if command.name != self.given.name))

    def step(self, state: Any, event: Event) -> tuple[Any, tuple[Command, ...]]:
        return self.core.step(state, event)


def desk_settings(config: ShareConfig) -> DeskSettings:
    return DeskSettings(
        devices=config.devices,
        pipelines=config.names,
        planner=config.planner,
        request_ms=config.request_ms,
        operation_ms=config.operation_ms,
        admission_ms=config.admission_ms if len(config.names) > 1 else 0,
        watchdog_ms=config.watchdog_ms,
    )
