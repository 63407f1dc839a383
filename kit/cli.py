"""`kit ...`. Only what a command needs is imported, and only when it runs: `kit --help` loads no torch and no pandas.

Exit status: 0 no check failed; 1 a check failed; 2 bad input; 3 the run broke (a rank raised, died or timed out);
130 interrupted, the ranks are ended. `check` ends with 3 for a run that broke, else as its verdict does. `show`,
`compare`, `export`, `trace`, `report` and `notebook` end with 0 when they could do their work; a notebook whose cell
fails ends with 3.
"""

from __future__ import annotations

import argparse
import json
import os
import pkgutil
import sys
import time
import traceback
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import kit
from kit import results
from kit.errors import BadInput, KitError

COMPARED_ROWS = 40  # of a comparison on a terminal; `kit export` has the runs themselves


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    command: Callable[[argparse.Namespace], int] = args.command
    try:
        status = command(args)
        sys.stdout.flush()
    except KitError as error:
        print(f"kit: {error}", file=sys.stderr)
        return 2 if isinstance(error, BadInput) else 3
    except KeyboardInterrupt:
        print("kit: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `kit show ... | head`: nobody reads on
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception:  # noqa: BLE001 - a fault of the kit itself: Python's own exit status 1 would say that a check failed
        traceback.print_exc()
        return 3
    return status


def parser() -> argparse.ArgumentParser:
    words = (__doc__ or "").split("\n\n")[1]
    usage = "kit [-h] COMMAND ..."
    top = argparse.ArgumentParser(
        prog="kit", description="Lifecycle Kit", epilog=words, allow_abbrev=False, usage=usage
    )
    top.add_argument("--version", action="version", version=f"kit {kit.__version__}")
    commands = top.add_subparsers(metavar="COMMAND ...", required=True, prog="kit")

    def add(
        name: str, command: Callable[[argparse.Namespace], int], text: str, **options: Any
    ) -> argparse.ArgumentParser:
        made = commands.add_parser(name, help=text, description=text, allow_abbrev=False, **options)
        made.set_defaults(command=command)
        return made

    asked = add("doctor", doctor, "what this box can do, and why not")
    asked.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    asked.add_argument(
        "--deep", action="store_true", help="also run ten probes on live ranks, in 130 s at most with a GPU"
    )
    add("labs", labs, "the labs with one line each")
    one = add("run", run, "run a lab from its first phase to its verdict")
    one.add_argument("lab", metavar="LAB")
    one.add_argument(
        "--set", metavar="KEY=VALUE", action="append", default=[], help="a setting of the lab; may be repeated"
    )
    one.add_argument(
        "--fault",
        metavar="NAME",
        action="append",
        default=[],
        help="switch a known bug on (`kit faults` lists them), one at a time",
    )
    one.add_argument(
        "--tolerances", metavar="FILE", type=Path, help="limits of the checks: a JSON object {name: number}"
    )
    one.add_argument("--out", metavar="DIR", type=Path, help="the run's folder; without it a new one among the runs")
    one.add_argument("--json", action="store_true", help="print one JSON object last")
    again = add("check", check, "judge a run again from its records")
    again.add_argument("dir", metavar="DIR", nargs="?", type=Path, help="without it the newest run")
    again.add_argument("--lab", metavar="LAB", help="judge by this lab's checks, whatever wrote the records")
    add("show", show, "a run: its state, its verdict, its times").add_argument("dir", metavar="DIR")
    add("compare", compare, "runs against the first: what changed most").add_argument("dirs", metavar="DIR", nargs="+")
    table = add("export", export, "a run's table as csv, parquet, md, tex, html or json")
    timeline = add("trace", trace, "a run as a timeline for Perfetto or chrome://tracing")
    for made in (table, timeline):
        made.add_argument("dir", metavar="DIR")
        made.add_argument("--to", metavar="FILE", type=Path, required=True)
    page = add("report", report, "runs as one page to send to somebody: verdicts, pictures, tables, provenance")
    page.add_argument("dirs", metavar="DIR", nargs="+")
    page.add_argument("--to", metavar="FILE.html", type=Path, required=True)
    headless = add("notebook", notebook, "run a notebook without a browser and keep it with its outputs")
    headless.add_argument("name", metavar="NAME", nargs="?", help="01, 01_offload_reload, or a path")
    headless.add_argument("--copy", metavar="DIR", type=Path, help="copy all notebooks and docs there, and run none")
    headless.add_argument(
        "-p", metavar=("KEY", "VALUE"), nargs=2, action="append", default=[], dest="given",
        help="a parameter of the notebook; may be repeated",
    )  # fmt: skip
    headless.add_argument("--to", metavar="FILE", type=Path, help=".ipynb or .html; without it one beside the runs")
    known = add("faults", faults, "the known bugs that can be switched on")
    known.add_argument("lab", metavar="LAB", nargs="?", help="of one lab alone")
    known.add_argument("--json", action="store_true")
    measuring(add)
    cleaning = add("clean", clean, "list and end leftovers of earlier runs: only processes the kit itself started")
    cleaning.add_argument("--yes", action="store_true", help="end them without a question")
    cleaning.add_argument("--dry-run", action="store_true", help="only list them")
    return top


def measuring(add: Callable[..., argparse.ArgumentParser]) -> None:
    """The commands that measure this machine."""
    devices = ("auto", "cpu", "cuda")
    measured = add("bench", bench, "side-by-side measurements")
    measured.add_argument("name", metavar="NAME", help=f"one of {', '.join(benches())}")
    measured.add_argument("--json", action="store_true", help="print one JSON object last")
    measured.add_argument("--quick", action="store_true", help="less of each, in a minute or two")
    measured.add_argument("--part", metavar="PART", action="append", default=[], help="one part, or X for every X.Y")
    measured.add_argument("--device", choices=devices, default="auto", help="auto: the GPU wherever there is a driver")
    measured.add_argument("--out", metavar="FILE", type=Path, help="where each row is written; else among the runs")
    recorded = add("reference", reference, "every lab and bench at this box's sizes, resumable")
    recorded.add_argument("--out", metavar="DIR", type=Path, help="the folder for the results")
    recorded.add_argument("--plan", action="store_true", help="print what each part is predicted to take, and run none")
    recorded.add_argument("--device", choices=devices, default="auto", help="auto: what the ranks would use")
    recorded.add_argument("--assumed", action="store_true", help="predict from assumed times, not from measured ones")
    recorded.add_argument("--minutes", metavar="M", type=float, help="start no part that would end later; on a GPU 8")
    recorded.add_argument("--pack", metavar="FILE.tgz", type=Path, help="also one file of at most 16 MiB to take home")


def doctor(args: argparse.Namespace) -> int:
    from kit import doctor as room

    began = time.monotonic()
    found = room.examine()
    status = 1 if found["problems"] else 0
    if not args.json:
        print(room.told(found), flush=True)
    if args.deep and status:
        print("kit: the probes need ranks, and ranks cannot run here", file=sys.stderr)
    elif args.deep:
        from kit.preflight.run import deep

        to = sys.stderr if args.json else sys.stdout
        found["deep"], status = deep(found, lambda line: print(line, file=to, flush=True), began)
    if args.json:
        print(json.dumps(found, indent=1))
    return status


def labs(_: argparse.Namespace) -> int:
    from kit.labs.discover import discover

    found, broken = discover()
    lines = {name: lab.summary for name, lab in found.items()} | broken
    print_columns([[name, text] for name, text in lines.items()])
    return 0


def run(args: argparse.Namespace) -> int:
    from kit.labs.configure import from_text
    from kit.labs.discover import find
    from kit.public import prepare
    from kit.results.run import memory_snapshots

    given: dict[str, str] = {}
    for pair in args.set:
        key, equals, value = pair.partition("=")
        if not (key and equals):
            raise BadInput(f"--set takes KEY=VALUE, not {pair!r}")
        if key in given:
            raise BadInput(f"--set {key} is given twice, {given[key]!r} and {value!r}: take one")
        given[key] = value
    tolerances = results.load_tolerances(args.tolerances) if args.tolerances else None
    if len(args.fault) > 1:
        raise BadInput(f"one fault at a time, not {' and '.join(args.fault)}: two would hide each other")
    config = from_text(find(args.lab), given)
    with prepare(args.lab, config, fault=next(iter(args.fault), None), out=args.out, tolerances=tolerances) as lab:
        verdict, error, status = None, None, 3
        try:
            lab.run()
            verdict = results.read_verdict(lab.dir / "verdict.json")
            status = results.exit_code(verdict)
        except BadInput:  # only the ranks could tell: nothing was measured
            raise
        except KitError as broke:
            error = str(broke)
            print(f"kit: the run broke: {error}", file=sys.stderr)
        except KeyboardInterrupt:
            status, error = 130, "interrupted"
            print("kit: interrupted; the ranks are ended", file=sys.stderr)
    if verdict is None and (lab.dir / "verdict.json").exists():  # as far as the records go
        verdict = results.read_verdict(lab.dir / "verdict.json")
    if verdict is not None:
        print(verdict)
    to = sys.stderr if args.json else sys.stdout
    print(f"the run is in {lab.dir}", file=to)
    if snapshots := memory_snapshots(kit.load(lab.dir)):
        print(f"memory snapshots: {snapshots}", file=to)
    if args.json:
        rows = verdict.to_json() if verdict is not None else None
        state = "failed" if error else "finished"
        print(json.dumps({"run": str(lab.dir), "status": state, "error": error, "verdict": rows, "exit": status}))
    return status


def check(args: argparse.Namespace) -> int:
    from kit.labs.discover import find

    folder = args.dir or next(iter(results.list_runs(results.runs_dir())), None)
    if folder is None:
        raise BadInput(f"there is no run in {results.runs_dir()}; name a folder")
    found = results.load(folder, checks=lambda _: find(args.lab).all_checks()) if args.lab else kit.load(folder)
    print(found)
    for note in found.notes:
        print(f"note: {note}")
    verdict, stored = found.verdict(), found.stored_verdict()
    print(f"\n{verdict}")
    if stored is not None and not args.lab:
        told = verdict.changes(stored)
        print(
            "\n".join(["", "differs from the stored verdict:", *told] if told else ["", "same as the stored verdict"])
        )
    return 3 if found.status == "failed" else results.exit_code(verdict)


def show(args: argparse.Namespace) -> int:
    from kit.results.frames import summary_of
    from kit.results.run import memory_snapshots

    found = kit.load(args.dir)
    print(found)
    fault = {"fault": found.fault} if found.fault else {}
    print(" ".join(f"{name}={value}" for name, value in {**found.config, **fault}.items()))
    for note in found.notes:
        print(f"note: {note}")
    if snapshots := memory_snapshots(found):
        print(f"memory snapshots: {snapshots}")
    print(f"\n{found.stored_verdict() or found.verdict()}\n")
    frame = found.frame()
    times = frame[frame["metric"] == "seconds"].groupby("phase", sort=False)["value"]
    if len(times):
        table = times.agg(["count", "median", "min", "max"])
        numbers = zip(table.index, table.to_numpy().tolist(), strict=True)
        rows = [
            [str(phase), f"{n:.0f}", *(f"{1e3 * seconds:.3f}" for seconds in spread)] for phase, (n, *spread) in numbers
        ]
        print_columns([["phase", "n", "median ms", "min ms", "max ms"], *rows])
    own = summary_of(frame) if found.own else frame.head(0)
    if len(own):
        lines = [[f"{x:.6g}" if isinstance(x, float) else str(x) for x in row] for row in own.to_numpy().tolist()]
        print("\nown numbers, over all ranks:")
        print_columns([list(own.columns), *lines])
    return 0


def compare(args: argparse.Namespace) -> int:
    from kit.results.comparison import settings
    from kit.results.frames import without_empty

    runs = [kit.load(path) for path in args.dirs]
    labs = list(dict.fromkeys(run.lab for run in runs))
    if len(labs) > 1:
        print(f"note: these are runs of different labs: {', '.join(labs)}")
    elif apart := settings(runs):
        print("; ".join(f"{name}: {' / '.join(map(str, values))}" for name, values in apart.items()))
    table = results.compare(runs)
    same = ["base_run", "run"] if len(runs) == 2 else ["base_run"]
    print(", ".join(f"{name} {table[name].iloc[0]}" for name in same if len(table)))
    for other in runs[1:]:
        count, differ = results.outcomes(runs[0], other)
        if count and other.lab == runs[0].lab:
            print(f"{other.id}: {count} losses, gradient norms and digests, {differ} of them not exactly the same")
    print(without_empty(table.drop(columns=same)).head(COMPARED_ROWS).to_string(index=False))
    if len(table) > COMPARED_ROWS:
        print(f"... and {len(table) - COMPARED_ROWS} rows that changed less")
    return 0


def export(args: argparse.Namespace) -> int:
    return save(lambda: kit.load(args.dir).save(args.to))


def trace(args: argparse.Namespace) -> int:
    return save(lambda: results.write_trace(kit.load(args.dir), args.to))


def report(args: argparse.Namespace) -> int:
    from kit.view.report import write_report

    runs = [kit.load(path) for path in args.dirs]
    return save(lambda: write_report(runs, args.to))


def notebook(args: argparse.Namespace) -> int:
    from kit.view.notebooks import copy_all, on_terminal, run_notebook

    if (args.name is None) == (args.copy is None):
        raise BadInput("name a notebook to run, such as 01, or a folder for copies with --copy DIR")
    if args.copy is not None:
        print(copy_all(args.copy))
        return 0
    tell = on_terminal if sys.stderr.isatty() else None
    print(run_notebook(args.name, dict(args.given), args.to, tell=tell))
    return 0


def save(write: Callable[[], Path]) -> int:
    """Write and tell where. A place that cannot be written was a bad one to name: no run broke."""
    try:
        print(write())
    except KitError as error:
        raise BadInput(str(error)) from error
    return 0


def faults(args: argparse.Namespace) -> int:
    from kit.labs.discover import discover, find

    rows = [
        {
            "lab": lab.name,
            "name": fault.name,
            "breaks": fault.breaks,
            "check": fault.check,
            "exit": fault.exit,
            "set": dict(fault.set),
            "devices": list(fault.devices),
        }
        for lab in ([find(args.lab)] if args.lab else discover().labs.values())
        for fault in lab.faults
    ]
    if args.json:
        print(json.dumps(rows, indent=1))
    else:
        cells = [[str(row[key]) for key in ("lab", "name", "check", "exit", "breaks")] for row in rows]
        print_columns([["lab", "fault", "caught by", "exit", "what breaks"], *cells])
    return 0


def bench(args: argparse.Namespace) -> int:
    names = benches()
    if args.name not in names:
        raise BadInput(f"there is no bench {args.name!r}; allowed are: {', '.join(names) or 'none'}")
    room = import_module("kit.bench.session")
    out = args.out or room.new_file(args.name, results.runs_dir())
    given = {"quick": args.quick, "as_json": args.json, "only": args.part, "device": args.device}
    status: int = room.conduct(args.name, out=out, **given)
    print(f"the rows are in {out}", file=sys.stderr)
    return status


def reference(args: argparse.Namespace) -> int:
    if args.out is None and not args.plan:
        raise BadInput("name a folder for the reference: --out DIR")
    room = import_module("kit.bench.reference")
    asked = {"device": args.device, "assumed": args.assumed, "minutes": args.minutes}
    status: int = room.plan(args.out, **asked) if args.plan else room.make(args.out, pack=args.pack, **asked)
    return status


def benches() -> list[str]:
    """The modules in kit/bench that have `parts`, without importing any."""
    home = Path(__file__).with_name("bench")
    found = [
        (info.name, home / (f"{info.name}/__init__.py" if info.ispkg else f"{info.name}.py"))
        for info in pkgutil.iter_modules([str(home)])
    ]
    return [name for name, path in found if "\ndef parts(" in path.read_text()]


def clean(options: argparse.Namespace) -> int:
    from kit.doctor import clean

    return clean(dry_run=options.dry_run, yes=options.yes)


def print_columns(rows: list[list[str]]) -> None:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
