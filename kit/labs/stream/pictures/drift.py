"""How far the trainer's policy is from the one that generated the tokens, by lag and by position in the answer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from matplotlib.ticker import MaxNLocator

from kit.labs.stream import tokens
from kit.labs.stream.pictures.times import whole_numbers
from kit.results import NotMeasured, Unjudged

if TYPE_CHECKING:
    from kit.draw.plots import RunData, Scene


def has_drift(data: RunData) -> bool:
    try:
        return len(tokens.drift(data.records, data.run.dir)) > 0
    except (NotMeasured, Unjudged):
        return False


def drift(scene: Scene) -> None:
    left, right = scene.figure.subplots(1, 2, width_ratios=(4, 6))
    table = tokens.drift(scene.data.records, scene.data.run.dir)
    highest = 0.0
    for lag in sorted({int(one) for one in table["lag"]}):
        some = table[table["lag"] == lag]
        count = some["tokens"].sum()
        kl, ratio = (float((some[name] * some["tokens"]).sum() / count) for name in ("KL", "ratio"))
        highest = max(highest, kl)
        left.bar(lag, kl, 0.7, color=scene.theme.series[0], zorder=2)
        left.text(lag, kl, f"{kl:.2g}\nratio {ratio:.4g}", ha="center", va="bottom", fontsize=8.5)
        right.plot(
            some["position"],
            some["mismatch"],
            marker="o",
            markersize=3,
            color=scene.theme.colour(lag),
            label=f"lag {lag}",
        )
    left.set_ylim(0, 1.4 * max(highest, 1e-9))
    whole_numbers(left, [int(lag) for lag in table["lag"]])
    left.set_xlabel("lag in versions")
    left.set_ylabel("KL per token")
    left.set_title("Drift of the policy by lag")
    right.set_ylim(0, 1.3 * max(float(table["mismatch"].max()), 1e-9))
    right.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True))
    right.set_xlabel("position in the answer")
    right.set_ylabel("mean |difference|")
    right.set_title("Trainer's minus recorded log-probability")
    right.legend(loc="upper right", ncols=4)
