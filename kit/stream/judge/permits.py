"""The rule that what is taken is returned: places, slots and devices."""

from __future__ import annotations

from collections.abc import Generator

from kit.results.records import Id, Row
from kit.results.rules import Missing, Violations
from kit.results.units import counted
from kit.stream.judge.history import LoopLedger

PERMITS = (("place", "place_back"), ("slot", "slot_back"))


def permits_return(ledger: LoopLedger) -> Violations:
    """Is every place, slot and device grant returned exactly once?"""
    pairs = [pair for pair in PERMITS if any(ledger.by_event[event] for event in pair)]
    lacks = [event for pair in pairs for event in pair if ledger.leaves_out(event)]
    pairs = [pair for pair in pairs if not {*lacks} & {*pair}]
    requests = ledger.by_event["acquire"]
    if not (pairs or requests or ledger.by_event["release"]):
        raise Missing(f"the ledger has no {f'`{lacks[0]}`' if lacks else '`place`, `slot` or `acquire`'} event")
    left: list[Row] = []
    in_use = 0
    for taken, back in pairs:
        out: dict[Id, Row] = {}
        ended: set[Id] = set()
        for row in ledger.rows:
            if row.event == taken:
                if before := out.get(row["group"]):
                    yield f"{row}: group {row['group']} already has one, since row {before.at}"
                out[row["group"]] = row
            elif row.event == back and out.pop(row["group"], None) is None:
                yield f"{row}: group {row['group']} has none to return"
            elif ledger.is_end(row):
                ended.add(row["group"])
        left += [row for row in out.values() if ledger.ended or row["group"] in ended]
        in_use += len(out)
    granted = yield from _grants(ledger)
    for row in [*left, *(granted if ledger.ended else ())]:
        yield f"{row}: never returned"
    if (in_use or granted) and not ledger.ended:
        raise Missing(f"the ledger has no `ended` event, so {counted(in_use + len(granted), 'permit')} may be in use")
    if lacks:
        raise Missing(f"the ledger has no {' and no '.join(f'`{event}`' for event in lacks)} event")
    return f"{counted(sum(len(ledger.by_event[taken]) for taken, _ in pairs) + len(requests), 'permit')} taken and returned"


REFUSALS = ("expired", "withdrawn", "error")  # of a request for devices


def _grants(ledger: LoopLedger) -> Generator[str, None, list[Row]]:
    """Check requests for devices, one per kind and cluster, and return those that are left. Only a `release` must have one to return,
    which may have been refused: a loop that ends by this error releases all."""
    open_: list[Row] = []
    refused: list[Row] = []
    for row in ledger.of("acquire", "granted", "release", "planned_release", *REFUSALS):
        if row.event == "error" and row.get("of") != "acquire":
            continue
        if row.event == "acquire" and "release" in row.ids:  # this kind is released first
            open_ = [asked for asked in open_ if asked["kind"] != row["release"]]
        matching = [asked for asked in open_ if _same_devices(asked, row)]
        if row.event == "acquire":
            if matching:
                yield f"{row}: kind {row['kind']} already has one, since row {matching[0].at}"
            open_.append(row)
        elif row.event == "granted":
            if not matching:
                yield f"{row}: kind {row['kind']} was not requested"
        else:
            open_ = [asked for asked in open_ if asked not in matching]
            refused += matching if row.event in REFUSALS else []
            if row.event == "release" and not matching:
                again = [asked for asked in refused if _same_devices(asked, row)]
                refused = [asked for asked in refused if asked not in again]
                if not again:
                    yield f"{row}: kind {row['kind']} has none to return"
    return open_


def _same_devices(asked: Row, row: Row) -> bool:
    """Whether a row may be about the devices of a request. It need not name their cluster; `withdrawn` may name only the cluster."""
    kind, cluster = row.get("kind", row.get("cluster")), asked.get("cluster", row.get("cluster"))
    return bool(asked["kind"] == kind and cluster == row.get("cluster", cluster))
