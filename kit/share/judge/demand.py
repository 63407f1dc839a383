"""Who has work, and which replicas could do it."""

from __future__ import annotations

from collections.abc import Iterator

from kit.results.records import Row
from kit.share.judge.books import Books, DeskLedger


def could_be_served(books: Books, name: str) -> bool:
    if books.active.get(name) or (name, "generation") not in books.waiting or not has_work(books, name):
        return False
    if name not in books.admitted or any(who == name for who, _ in books.sleeping | books.waking):
        return False
    idle = books.idle()
    return any(bundle <= idle for bundle in sleeping_bundles(books, name))


def is_needy(books: Books, name: str) -> bool:
    """Whether a pipeline has no replica but waits to generate, or generates and has work left by its reports (or never reports). One whose
    replicas are dead or removed, or sleep on devices that its own clusters hold, waits for nobody else."""
    done, target = books.progress(name)
    waits = (name, "generation") in books.waiting
    wants = waits or (name in books.generating and (target > done or name not in books.streams))
    own = {device for who, cluster in books.held if who == name for device in books.clusters[name][cluster]}
    busy = all(
        books.bundle(name, replica) & own or (name, replica) in books.out | books.dead
        for replica in books.replicas(name)
    )
    return wants and not busy and name not in books.leaving and not books.active.get(name)


def idle_while_needed(ledger: DeskLedger) -> Iterator[tuple[float, Row, list[int], list[str]]]:
    """Yield periods between two plans in which pipelines had work: seconds, the row that ends it, the idle devices that their sleeping
    replicas fit on, and the pipelines of these replicas.
    """
    before: Row | None = None
    for row, books in ledger.replay():
        lasts = before is not None and row.time > before.time and books.plan is None
        working = [name for name in books.clusters if has_work(books, name)] if lasts else []
        if before is not None and working:
            idle = books.idle()
            fits = [(name, bundle) for name in working for bundle in sleeping_bundles(books, name) if bundle <= idle]
            devices = sorted(set[int]().union(*(bundle for _, bundle in fits)))
            yield row.time - before.time, row, devices, sorted({name for name, _ in fits})
        before = row


def has_work(books: Books, name: str) -> bool:
    """Whether a pipeline may generate and its reports leave work."""
    done, target = books.progress(name)
    wants = name in books.generating or (name, "generation") in books.waiting
    return wants and target > done and name not in books.leaving and (name, "generation") not in books.held


def sleeping_bundles(books: Books, name: str) -> list[frozenset[int]]:
    away = books.awake() | books.sleeping | books.waking | books.dead | books.out
    return [books.bundle(name, replica) for replica in books.replicas(name) if (name, replica) not in away]


def lacks(books: Books, name: str, replica: int) -> bool:
    """Whether a pipeline with work has no replica, and this one could wake."""
    moving = any(who == name for who, _ in books.sleeping | books.waking)
    return (
        has_work(books, name) and not books.active[name] and not moving and books.bundle(name, replica) <= books.idle()
    )
