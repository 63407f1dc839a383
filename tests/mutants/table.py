"""Write the page of mutants, docs/mutants.md, from results: how many were caught, by which checks, and all that were not."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from kit.measure.recorder import provenance
from tests.mutants import reachable
from tests.mutants.catalogue import CATALOGUE, SETUPS, others
from tests.mutants.mutant import Mutant

PAGE = """# Mutants: which bugs do the labs see?

The kit's own code under test is changed on purpose, one small bug at a time, and the lab runs with few cycles, of sync mostly without the
sweep. What the lab lets through is listed below.

```
make mutants                                   # all of them, in reused Worlds; writes this page
python -m tests.mutants.run --only sync        # those of one lab, module or id
```

{machine}

{score}

- **caught**: a check fails that passes without the mutant, or the run ends with 3 and names the rank that raised or died, or the ranks that
  others waited for.
- **broke**: the run ends with 3 and names nobody, or only a rank that waited for another. It counts as seen: such a run does not pass.
- **survived**: the run ends with 0.
- **equivalent**: survived, and all records (without times and memory), digests included, are the same as without the mutant in all short
  setups of its lab. Records in which three runs without a mutant differ, or two with it, are left out. Equivalent mutants are not in the
  *score*; *at least* counts them as survived, as a machine that varies much, or code that no setup runs, would hide a difference.
- All were written by hand by somebody who knew the code; those **against the docs** break a sentence of the docs.
  `python -m tests.mutants.mechanical` lets a library draw others.
- The results are in `tests/mutants/written.jsonl`; each holds until a source that its lab can reach changes.
- Code that the labs look through, clocks, logging and texts are not mutated.

## By check

*named*: mutants that were written for this check. *seen*: how many of them it saw. *otherwise*: how many another check saw, or a run that
broke. *others*: mutants of other checks that this one saw as well.

{checks}

## Not seen

{survived}

## Equivalent

{equivalent}

## All

{everything}
"""
LABS = ("offload", "split", "sync")
Rows = Sequence[tuple[Mutant, dict[str, Any]]]


def write(path: Path, results: Sequence[dict[str, Any]]) -> None:
    rows = combined(results)
    text = PAGE.format(
        machine=machine(rows),
        score=score(rows),
        checks=checks(rows),
        survived=listed(rows, "survived"),
        equivalent=listed(rows, "equivalent"),
        everything=everything(rows),
    )
    path.write_text(text)


def combined(results: Sequence[dict[str, Any]]) -> Rows:
    """Return one row per mutant from its runs in one or more setups."""
    rows = []
    for mutant in CATALOGUE:
        mine = [row for row in results if row["id"] == mutant.id]
        if not mine:
            continue
        reported = next((row for state in ("caught", "broke") for row in mine if row["state"] == state), None)
        if reported is None:
            reported = dict(next((row for row in mine if row["differs"] or row["error"]), mine[0]))
            wanted = {mutant.config, *others(mutant.config)}
            left = wanted - {row["setup"] for row in mine}
            reported["tried"] = f"in {len(wanted) - len(left)} of {len(wanted)} setups"
            if not left and not reported["differs"] and not reported["error"]:
                reported["state"] = "equivalent"
        rows.append(
            (
                mutant,
                {**reported, "ran": sum(row["ran"] for row in mine), "seconds": sum(row["seconds"] for row in mine)},
            )
        )
    return rows


def machine(rows: Rows) -> str:
    about = provenance()
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    cpu = about["cpu"]
    minutes = sum(result["seconds"] for _, result in rows) / 60
    commit = (about["git"] or {}).get("commit") or "unknown"
    return (
        f"Recorded on {about['time'][:10]} at commit `{commit[:12]}`: {len(rows)} of {len(CATALOGUE)} mutants, in "
        f"{minutes:.0f} minutes of runs, on {cpu['model'] or 'a CPU'} with {cpu['affinity']} cores and no GPU; "
        f"Python {about['python']}, {versions}."
    )


def score(rows: Rows) -> str:
    groups = {
        **{lab: [row for row in rows if SETUPS[row[0].config].lab == lab] for lab in LABS},
        "against the docs": [row for row in rows if row[0].origin == "docs"],
        "all": rows,
    }
    lines = []
    for name, those in groups.items():
        states = Counter(result["state"] for _, result in those)
        broke = sum(1 for _, result in those if result["state"] == "caught" and not result["by"])
        judged = len(those) - states["equivalent"]
        seen = states["caught"] + states["broke"]
        shares = [f"{seen / of:.1%}" if of else "-" for of in (judged, len(those))]
        caught = [states["caught"] - broke, broke, states["broke"]]
        lines.append([name, len(those), *caught, states["survived"], states["equivalent"], *shares])
    columns = ["caught by a check", "caught as the run broke", "broke", "survived", "equivalent", "score", "at least"]
    return markdown(["", "mutants", *columns], lines)


def checks(rows: Rows) -> str:
    lines = []
    labs = dict.fromkeys(SETUPS[mutant.config].lab for mutant, _ in rows)
    for lab in labs:
        of_lab = [row for row in rows if SETUPS[row[0].config].lab == lab]
        names = dict.fromkeys(
            [*(mutant.check for mutant, _ in of_lab), *(name for _, row in of_lab for name in row["by"])]
        )
        for name in sorted(names):
            named = [result for mutant, result in of_lab if mutant.check == name]
            caught = [result for result in named if result["state"] == "caught"]
            seen = sum(name in result["by"] for result in caught)
            others = sum(name in result["by"] for mutant, result in of_lab if mutant.check != name)
            missed = sum(result["state"] == "survived" for result in named)
            lines.append([lab, f"`{name}`", len(named), seen, len(caught) - seen, missed, others])
    return markdown(["lab", "check", "named", "seen", "otherwise", "survived", "others"], lines)


def listed(rows: Rows, state: str) -> str:
    lines = [
        [
            result["id"],
            f"`{mutant.place}`",
            mutant.bug,
            mutant.origin,
            f"`{mutant.check}`",
            "" if result["ran"] or result["error"] else "never run",
            what_else(result),
        ]
        for mutant, result in rows
        if result["state"] == state
    ]
    return (
        markdown(["id", "function", "bug", "origin", "should be seen by", "", "what else"], lines) if lines else "None."
    )


def what_else(result: dict[str, Any]) -> str:
    """Describe how a run that passed differs from one without the mutant."""
    if result["error"]:
        return f"{result['tried']}; {result['error']}"
    parts = [result["tried"]]
    parts += [f"{result['differs']} records differ, such as {result['first']}"] if result["differs"] else []
    parts += [f"not judged any more: {', '.join(result['null'])}"] if result["null"] else []
    return "; ".join(parts)


def everything(rows: Rows) -> str:
    lines = [
        [
            result["id"],
            result["setup"],
            f"`{mutant.place}`",
            mutant.bug,
            mutant.origin,
            result["state"],
            ", ".join(f"`{name}`" for name in result["by"]) or result["error"].partition(":")[0],
        ]
        for mutant, result in rows
    ]
    return markdown(["id", "setup", "function", "bug", "origin", "state", "seen by"], lines)


def markdown(head: Sequence[str], lines: Iterable[Sequence[object]]) -> str:
    cells = [[str(cell).replace("|", "\\|").replace("\n", " ") for cell in line] for line in lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, ["---"] * len(head), *cells))


def caught(page: Path) -> dict[str, str]:
    """Return the ids of mutants that a page lists as caught, with their setups."""
    lines = page.read_text().partition("## All")[2].splitlines() if page.exists() else []
    rows = [line.strip("| ").split(" | ") for line in lines]
    return {row[0]: row[1] for row in rows if len(row) > 5 and row[5] == "caught"}


def read(results: Path) -> list[dict[str, Any]]:
    """Return the results that belong to these sources."""
    lines = [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
    digests = {lab: reachable.digest(lab) for lab in LABS}
    # A setup of older sources may have another name today.
    return [line for line in lines if line["setup"] in SETUPS and line["kit"] == digests[SETUPS[line["setup"]].lab]]
