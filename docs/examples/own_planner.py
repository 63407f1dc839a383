"""A planner, which divides devices among generating pipelines.
In seconds, without ranks: kit run share --set simulated=true --set planner=docs.examples.own_planner:takes_turns"""

from typing import Any


def takes_turns(view: Any) -> None:
    """Who has least gets the next replica; who has two more than another gives one up."""
    waits = [member for member in view.shares.values() if member.since >= 0]
    while waits:
        poorest = min(waits, key=lambda member: (len(member.active), member.name))
        fits = [replica for replica in poorest.free if poorest.bundles[replica] <= view.idle]
        if fits:
            view.expand(poorest.name, fits[0])
        else:
            waits.remove(poorest)
    for member in view.shares.values():
        for other in view.shares.values():
            fits = [replica for replica in member.free if member.since >= 0 and not member.active]
            spare = [replica for replica in sorted(other.active) if len(other.active) > 1]
            pairs = [
                (mine, theirs) for mine in fits for theirs in spare if member.bundles[mine] <= other.bundles[theirs]
            ]
            if pairs and pairs[0][1] not in other.touched:
                view.shrink(other.name, pairs[0][1])
                view.expand(member.name, pairs[0][0])


# -- with one bug each ---------------------------------------------------------------------------------------------------


def keeps_half(view: Any) -> None:
    """Never gives away the second half of the devices."""
    kept = view.idle & {*range(view.devices // 2, view.devices)}
    view.idle -= kept
    takes_turns(view)
    view.idle |= kept
