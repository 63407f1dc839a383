"""Numbers with their units and tables of texts, as people read them: the one place that formats them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet

from kit.machine import GIB, MIB

ROW = "*"  # of a table's column: the unit that each row's own column `unit` names


def amount(value: float | None, unit: str = "") -> str:
    """12.3 ms, 2.0 MiB, 9.5 GB/s, 3; counts and ratios have no unit. A missing number is "-"."""
    if value is None or not math.isfinite(value):
        return "-" if value is None else str(value)
    if unit == "s":
        # Compared with 0.99, since what rounds up to a second would read 1e+03 ms.
        seconds = abs(value)
        scale, unit = (1.0, "s") if seconds > 0.99 else (1e3, "ms") if seconds > 0.99e-3 or not seconds else (1e6, "µs")
        return f"{digits(value * scale)} {unit}"
    if unit == "B":
        return f"{value / MIB:.1f} MiB"
    if unit == "B/s":
        return f"{digits(value / 1e9)} GB/s"
    word = unit_word(unit)
    return f"{digits(value)} {word}" if word else digits(value, 4)


def digits(value: float, most: int = 3) -> str:
    """A number with this many digits; a larger number keeps all digits before the point: 0.0123, 1450, 1234567, never 1.45e+03."""
    if abs(value) >= 1e15 or 0 < abs(value) < 1e-4:
        return f"{value:.3g}"
    rounded = f"{value:.{most}g}"
    return f"{value:.0f}" if "e+" in rounded or float(value).is_integer() else rounded


def duration(seconds: float) -> str:
    """A time that is still running, without digits that flicker: 8.1 µs, 2.2 ms, 0.31 s, 12 s, 3 min 5 s."""
    if seconds < 0.0000995:
        return f"{1e6 * seconds:.2g} µs"
    if seconds < 0.0995:
        return f"{1000 * seconds:.2g} ms"
    if seconds < 9.95:
        return f"{seconds:.2g} s"
    whole = round(seconds)
    return f"{whole} s" if whole < 120 else f"{whole // 60} min {whole % 60} s"


def time_unit(longest: float) -> tuple[float, str]:
    """The factor from seconds, and the unit, in which an axis that reaches this far is read best."""
    return (1.0, "s") if longest >= 2 else (1e3, "ms") if longest >= 2e-3 else (1e6, "µs")


def size_unit(most: float) -> tuple[float, str]:
    return (1 / GIB, "GiB") if most >= 8 * GIB else (1 / MIB, "MiB")


def size(value: float) -> str:
    """Bytes in the larger of the two units that people compare: 512.0 MiB, 31.2 GiB."""
    factor, unit = size_unit(value)
    return f"{value * factor:.1f} {unit}"


def unit_word(unit: str) -> str:
    """The unit beside a number; counts and ratios have none."""
    return "" if unit in {"1", "ratio"} else unit


def counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def sample_counts(counts: AbstractSet[int]) -> str:
    return f"n = {min(counts)}" if len(counts) == 1 else f"n = {min(counts)} to {max(counts)}"


SHORTEST_CELL = 5  # characters of a cell that is cut, unless its column says more


def columns(
    rows: Iterable[Iterable[str]], *, width: int = 0, right: Sequence[int] = (), least: Mapping[int, int] | None = None
) -> str:
    """Cells under each other; `right` numbers the right-aligned columns. The widest columns but the first are cut to fit `width`, none
    below its `least` characters."""
    table = [[" ".join(cell.split()) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    shortest = [(least or {}).get(index, SHORTEST_CELL) for index in range(len(widths))]
    while width and sum(widths) + 2 * (len(widths) - 1) > width:
        cuttable = [index for index in range(1, len(widths)) if widths[index] > shortest[index]]
        if not cuttable:
            break
        widths[max(cuttable, key=widths.__getitem__)] -= 1

    def padded(index: int, cell: str) -> str:
        most = widths[index]
        cut = cell if len(cell) <= most else f"{cell[: most - 1]}…"
        return cut.rjust(most) if index in right else cut.ljust(most)

    return "\n".join("  ".join(padded(*cell) for cell in enumerate(row)).rstrip() for row in table)


def table_html(
    head: Sequence[str], rows: Iterable[Sequence[str]], *, right: Sequence[int] = (), caption: str = ""
) -> str:
    """An HTML table. Cells must be escaped already; `right` numbers the right-aligned columns."""
    # A number stays on one line with its unit.
    sides = ["right;white-space:nowrap" if index in right else "left" for index in range(len(head))]

    def line(tag: str, cells: Sequence[str]) -> str:
        return "".join(
            f'<{tag} style="text-align:{side}">{cell}</{tag}>' for side, cell in zip(sides, cells, strict=True)
        )

    body = "".join(f"<tr>{line('td', row)}</tr>" for row in rows)
    above = f'<caption style="text-align:left">{caption}</caption>' if caption else ""
    return f"<table>{above}<thead><tr>{line('th', head)}</tr></thead><tbody>{body}</tbody></table>"
