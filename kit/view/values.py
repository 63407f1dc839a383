"""What a cell's last line was on each rank, equal values told once: `[0-3] 3.0`."""

from __future__ import annotations

from collections.abc import Sequence

from kit.view.progress import ranks_short


class RankValues:
    """The shown values by rank; `values[rank]` is the text, or None where a rank's last line had none."""

    def __init__(self, ranks: Sequence[int], texts: Sequence[str | None]) -> None:
        self.values = dict(zip(ranks, texts, strict=True))

    def __getitem__(self, rank: int) -> str | None:
        return self.values[rank]

    def __repr__(self) -> str:
        same: dict[str, list[int]] = {}
        for rank, text in self.values.items():
            if text is not None:
                same.setdefault(text, []).append(rank)
        marks = {text: f"[{ranks_short(ranks)}] " for text, ranks in same.items()}
        width = max(map(len, marks.values()), default=0)
        indent = "\n" + " " * width  # so that a tensor's rows stay under each other
        return "\n".join(f"{marks[text]:<{width}}{text.replace(chr(10), indent)}" for text in same)
