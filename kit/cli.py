"""`kit ...`. Each command imports only what it needs, when it runs: `kit --help` loads no torch and no pandas.

Exit status: 0 no check failed; 1 a check failed or nothing was measured (with --strict: or one check was not measured);
2 bad input; 3 the run broke (a rank raised, died or timed out); 130 interrupted, and the ranks are ended. `check` ends
with 3 if the run broke, with 1 if its rows or verdict were changed after it ended, otherwise by its verdict. `runs`,
`show`, `compare`, `export`, `trace`, `report` and `notebook` end with 0 if they succeed; `notebook` ends with 3 if a
cell fails.

DIR is the folder or the id of a run (`kit runs` lists them). A command with one DIR uses the newest finished run by default.
A command with several also accepts the folder of a sweep, which stands for its runs.

Completion of commands, options, labs, settings, faults and runs in bash and zsh: eval "$(register-python-argcomplete kit)"
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import sys
import threading
import time
import traceback
import warnings as python_warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import kit
from kit import results, target
from kit.errors import BadInput, KitError, hint
from kit.labs.definition import NAMES, Definition, fields, holder, known_fields, nested_fields
from kit.labs.discover import ANSWERS, ENDS, describe_folder, discover, find, select_runs, tagged
from kit.results.comparison import Comparison, answers_changed, compact, in_words, labelled
from kit.results.frames import json_rows, known_suffix, readable, summary_of
from kit.results.records import flat, output_file, read_json, to_json, user_path
from kit.results.rules import suspect_in
from kit.results.run import INDEX, find_run, memory_snapshots, save_settings, write_junit
from kit.results.runtable import run_frame, sweep_frame
from kit.results.units import ROW, columns, counted
from kit.results.verdict import MARKS
from kit.trackers import TRACKERS, USAGE

if TYPE_CHECKING:
    import pandas as pd

    from kit.labs.lab import Lab

SILENT = {"show", "check", "compare", "export", "trace", "report", "runs", "faults"}  # they print only their result
FIRST_LINE_S, LINE_S = 2.0, 5.0
# Columns of the table of runs that a terminal has no room for, and --to FILE has.
ELSEWHERE = ("started", "machine", "sweep")
COMPARED_ROWS = 40  # rows of a comparison on a terminal; `kit export --table compare` has all of them
SETTINGS_SUFFIXES = (".yaml", ".yml")
WIDTH = 100  # of tables that go into a pipe or a file
MOST_MINUTES = 7 * 24 * 60


class CommandAnswer(NamedTuple):
    """A command's result: for --json, as text, and the exit status. Progress is printed as it happens."""

    data: Any
    text: str = ""
    status: int = 0


def main(argv: list[str] | None = None) -> int:
    if argv is None and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))  # as on ranks and with `python -m kit`: a person's module comes first
    words = sys.argv[1:] if argv is None else argv
    as_json = "--json" in words
    try:
        args = parse_words(words)
        with (
            contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext(),
            python_warnings.catch_warnings(),
            STILL_AT_WORK.shown(words[0] if words and words[0] in SILENT else ""),
        ):
            python_warnings.showwarning = show_warning
            answer: CommandAnswer = args.command(args)
    except KitError as error:
        print(f"kit: {error}", file=sys.stderr)
        answer = CommandAnswer({"error": str(error)}, status=2 if isinstance(error, BadInput) else 3)
    except KeyboardInterrupt:
        print("kit: interrupted", file=sys.stderr)
        answer = CommandAnswer({"error": "interrupted"}, status=130)
    except Exception as error:  # noqa: BLE001 - a bug in the kit: Python's exit status 1 would mean that a check failed
        traceback.print_exc()
        answer = CommandAnswer({"error": repr(error)}, status=3)
    try:
        if as_json or answer.text:
            print(to_json(answer.data) if as_json else answer.text)
        sys.stdout.flush()
    except BrokenPipeError:  # `kit show ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return answer.status


class StillAtWork:
    """Lines about a command that takes longer than two seconds and shows nothing else meanwhile."""

    def __init__(self) -> None:
        self._words = ""

    def note(self, words: str) -> None:
        self._words = f": {words}"

    @contextlib.contextmanager
    def shown(self, command: str) -> Iterator[None]:
        """For the time of the command; without a name nothing is shown."""
        ended, began, self._words = threading.Event(), time.monotonic(), ""

        def tell() -> None:
            wait_s = FIRST_LINE_S
            while not ended.wait(wait_s):
                line = f"kit: {command} has worked for {time.monotonic() - began:.0f} s{self._words}\n"
                os.write(2, line.encode())  # without Python's lock: the process may be forked meanwhile
                wait_s = LINE_S

        thread = threading.Thread(target=tell, daemon=True)
        if command:
            thread.start()
        try:
            yield
        finally:
            ended.set()


STILL_AT_WORK = StillAtWork()


def show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    print(f"kit: {message}", file=sys.stderr)


# -- the words of a command line -----------------------------------------------------------------------------------------


class CommandParser(argparse.ArgumentParser):
    """Report every unknown word as bad input, with a hint."""

    def error(self, message: str) -> NoReturn:
        if wrong := re.search(r"invalid choice: '?(.*?)'? \(choose from (.*)\)", message):
            allowed = re.findall(r"[\w-]+", wrong[2])
            message = f"there is no {message.split()[1].strip(':').lower()} {wrong[1]!r}; {hint(wrong[1], allowed)}"
        raise BadInput(f"{message} (see `{self.prog} --help`)")


def parse_words(words: Sequence[str]) -> argparse.Namespace:
    top = parser()
    if "_ARGCOMPLETE" in os.environ:
        import argcomplete

        argcomplete.autocomplete(top, always_complete_options=False)
    args, unknown = top.parse_known_args(words)
    if unknown:
        raise BadInput(f"`{args.parser.prog}` does not accept {unknown[0]}; {meant(args, unknown)}")
    return args


def meant(args: argparse.Namespace, unknown: Sequence[str]) -> str:
    """A suggestion for words that a command does not accept: a setting of the lab or another option."""
    name, equals, value = unknown[0].partition("=")
    key = name.lstrip("-").replace("-", "_")
    if (
        args.command is run_command
        and args.lab in discover().labs
        and key in known_fields(discover().labs[args.lab].config)
    ):
        plain_value = value if equals else next(iter(unknown[1:]), "VALUE")
        return f"did you mean --set {key}={plain_value}?"
    return hint(name, re.findall(r"(?<!\w)--[\w-]+", args.parser.format_usage()))


def lab_names(**_: Any) -> list[str]:
    return list(tagged())


def setting_names(parsed_args: argparse.Namespace, **_: Any) -> list[str]:
    return [f"{name}=" for name in known_fields(find(parsed_args.lab).config)]


def fault_names(parsed_args: argparse.Namespace, **_: Any) -> list[str]:
    return [fault.name for fault in find(parsed_args.lab).faults]


def tracker_names(**_: Any) -> list[str]:
    return [*TRACKERS]


def run_names(prefix: str, **_: Any) -> list[str]:
    from argcomplete.completers import FilesCompleter

    return [*(path.name for path in results.list_runs(results.runs_dir())), *FilesCompleter()(prefix)]


BENCH = "bench"  # the tag of a lab that is a bench, and the start of its name


def benches(**_: Any) -> list[str]:
    return sorted(name.removeprefix(f"{BENCH}-") for name in tagged(BENCH))


# -- labs and their runs -------------------------------------------------------------------------------------------------


def labs(args: argparse.Namespace) -> CommandAnswer:
    if args.lab is None:
        lines = {name: lab.summary for name, lab in tagged(args.tag).items()} | discover().broken
        others = sorted(discover().labs.keys() - lines.keys())
        rest = (
            f"\n\n`kit doctor --deep` and `kit bench` run others: {', '.join(others)}"
            if others and not args.tag
            else ""
        )
        facts = [{"lab": name, "summary": text} for name, text in lines.items()]
        return CommandAnswer(facts, columns(lines.items()) + rest)
    lab = find(args.lab)
    rows = [
        {
            "name": field.name,
            "default": field.default,
            "allowed": field.allowed(),
            "choices": field.choices,
            **{name: getattr(field.option, name) for name in ("low", "high", "unit", "help")},
        }
        for field in [*fields(lab.config), *nested_fields(lab.config, NAMES[0])]
    ]
    cells = [[row["name"], in_words(row["default"]), f"{row['allowed']} {row['unit']}", row["help"]] for row in rows]
    text = columns([["setting", "default", "allowed", "description"], *cells])
    if (held := holder(lab.config)) is not None:
        text += f"\n\na.NAME, b.NAME, ...: {held.option.help}; NAME alone sets it for all of them"
    return CommandAnswer({"lab": args.lab, "settings": rows}, text)


def run_command(args: argparse.Namespace) -> CommandAnswer:
    from kit import public
    from kit.labs.discover import from_text

    lab, swept = find(args.lab), pairs("--sweep", args.sweep)
    texts = pairs("--set", args.set)
    if empty := [name for name, values in swept.items() if not values]:
        raise BadInput(f"--sweep {empty[0]}= gives no value; separate values by commas, as in {empty[0]}=V1,V2")
    if twice := set(texts) & set(swept):
        raise BadInput(f"--set and --sweep both give {min(twice)}; use only one")
    if len(args.fault) > 1:
        raise BadInput(f"use one fault at a time, not {' and '.join(args.fault)}, because faults can hide each other")
    if args.junit:
        output_file(args.junit)
    if args.repeat < 1:
        raise BadInput(f"--repeat must be at least 1, not {args.repeat}")
    settings: dict[str, Any] = {}
    if args.like:
        like = load_run(args.like)
        if like.lab != args.lab:
            raise BadInput(f"--like {args.like} is a run of lab {like.lab!r}, not {args.lab!r}")
        settings = like.config
        if like.fault and not args.fault:
            print(f"kit: --like takes no fault; {like.id} ran with --fault {like.fault}", file=sys.stderr)
    settings |= from_files(lab, args.foreign) if args.foreign else {}
    settings |= public.settings_from_file(args.config) if args.config else {}
    settings |= from_text(lab, texts)
    tolerances = results.load_tolerances(args.tolerances) if args.tolerances else None
    fault = next(iter(args.fault), None)

    def once(config: Mapping[str, Any], out: Path | None) -> CommandAnswer:
        return run_lab(
            args.lab, {**settings, **config}, out, strict=args.strict, fault=fault, tolerances=tolerances, log=args.log
        )

    if not swept and args.repeat == 1:
        answer = once({}, args.out)
        folders = [Path(answer.data["run"])]
    else:
        points = public.sweep_points(lab, swept, args.repeat)
        public.check_points(lab, settings, points, fault)
        status, folder = public.sweep(args.lab, points, args.out, lambda config, out: report_swept(once(config, out)))
        answer = CommandAnswer(*index(folder, args.repeat), status)
        folders = public.runs_of(folder)
    if args.junit:
        made = [(run, run.shown_verdict()) for run in map(kit.load, folders)]
        print(f"JUnit: {write_junit(made, args.junit)}", file=sys.stderr)
    return answer


def from_files(lab: Definition, paths: Sequence[Path]) -> dict[str, Any]:
    """Settings from files of other systems. Keys without a setting are listed on stderr, so none is dropped silently."""
    from kit import public

    if not lab.foreign:
        raise BadInput(f"lab {lab.name!r} does not support --from FILE; use --config FILE")
    if len({path.resolve() for path in paths}) < len(paths):
        raise BadInput(f"--from names {paths[0]} twice; give each pipeline its own file")
    settings, unknown = target.load_callable(lab.foreign)(
        {str(path): public.settings_from_file(path) for path in paths}
    )
    print(f"kit: from {', '.join(map(str, paths))}: {named_values(settings)}", file=sys.stderr)
    for key in unknown:
        print(f"kit: no setting for {key}", file=sys.stderr)
    return dict(settings)


def pairs(option: str, words: Sequence[str]) -> dict[str, str]:
    sources: dict[str, str] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not (key and equals):
            raise BadInput(f"{option} takes KEY=VALUE, not {word!r}")
        if key in sources:
            raise BadInput(f"{option} {key} is given twice, as {sources[key]!r} and {value!r}; use only one")
        sources[key] = value
    return sources


def run_lab(
    lab_name: str,
    config: Mapping[str, Any],
    out: Path | None,
    *,
    strict: bool = False,
    steps: Callable[[Lab], None] = lambda _: None,
    **options: Any,
) -> CommandAnswer:
    """`steps` may run phases of the lab before the rest is run."""
    from kit.public import prepare_lab
    from kit.world.calls import without_advice

    with contextlib.closing(prepare_lab(lab_name, config, out=out, **options)) as lab:
        error, status = None, 3
        try:
            steps(lab)
            lab.run()
            status = results.exit_code(results.read_verdict(lab.dir / "verdict.json"), strict=strict)
        except BadInput:  # only the ranks could detect it; nothing was measured
            raise
        except KitError as broke:
            error = without_advice(str(broke))
            print(f"kit: the run broke: {error}", file=sys.stderr)
        except KeyboardInterrupt:
            status, error = 130, "stopped"
            print("kit: stopped; the ranks are ended", file=sys.stderr)
    made = kit.load(lab.dir)
    verdict = made.stored_verdict()  # for a broken run, as far as its records go
    lines = [repr(verdict)] if verdict is not None else []
    lines.append(f"the run is in {lab.dir}")
    if snapshots := memory_snapshots(made):
        lines.append(f"memory snapshots: {snapshots}")
    lines += unmeasured_notes(made, verdict, strict=strict)
    rows = verdict.to_json() if verdict is not None else None
    state = "stopped" if status == 130 else "failed" if error else "finished"
    if state == "finished":  # after a Ctrl-C, pandas may be half imported
        lines += [f"note: {note}" for note in made.notes]
    data = {"run": str(lab.dir), "status": state, "error": error, "verdict": rows, "exit": status}
    return CommandAnswer(data, "\n".join(lines), status)


def unmeasured_notes(run: results.Run, verdict: results.Verdict | None, *, strict: bool) -> list[str]:
    """What a reader of the last line must know: leak checks that never looked at own code, and with `strict` every null check."""
    nulls = [row for row in verdict or () if row.passed is None]
    if strict and nulls:
        return [f"not measured, which --strict counts as failed: {', '.join(row.check for row in nulls)}"]
    if verdict is not None and len(nulls) == len(verdict):
        advice = "; give --lab NAME for a lab's checks, or record with Recorder(DIR, observe=True)"
        return [f"nothing was measured, so nothing passed{'' if verdict else advice}"]
    own = suspect_in(run.config, None)
    needed = run.cycles_needed() if nulls and own and "cycles" in run.config else {}
    if short := [row for row in nulls if row.check in needed]:
        words = ", ".join(f"{row.check} ({row.why.removeprefix('not measured: ')})" for row in short)
        return [f"too few cycles to see leaks and drift of {own}: {words}"]
    return []


def report_swept(answer: CommandAnswer) -> tuple[int, dict[str, Any]]:
    print(answer.text.partition("\n")[0], flush=True)
    return answer.status, {name: answer.data[name] for name in ("status", "error", "exit")}


def index(folder: Path, repeat: int) -> tuple[dict[str, Any], str]:
    import pandas as pd

    data = read_json(folder / INDEX)
    rows = [describe_folder(folder / row["dir"]) for row in data["runs"]]
    lines = [run_list(rows, run_frame(rows).assign(run=[row["dir"] for row in data["runs"]]))[1]]
    if repeat > 1:
        rows = [{**row, "set": named_values(row["set"])} for row in data["spread"]]
        heads = {"set": "settings", "what": "over the repeats", "count": "n"}
        lines.append(table_text(pd.DataFrame(rows).rename(columns=heads), dict.fromkeys(SPREAD, ROW)))
    lines.append(f"the sweep is in {folder}")
    return {"sweep": str(folder), **data}, "\n\n".join(lines)


SPREAD = ("median", "min", "max")


def runs_command(args: argparse.Namespace) -> CommandAnswer:
    folder = args.dir or results.runs_dir()
    if args.dir and not args.dir.is_dir():
        raise BadInput(f"there is no folder {args.dir}")
    from kit.labs.discover import value_of

    asked = {name: getattr(args, name) for name in ("lab", "fault", "status", "verdict")}
    config = {name: value_of(text) for name, text in pairs("--set", args.set).items()}
    rows = select_runs(results.list_runs(folder), **asked, config=config)
    picks = [name for name in args.columns.split(",") if name]
    make = sweep_frame if args.sweeps else run_frame
    if args.to:
        from kit.view.runs import save_runs

        return write_text_file(lambda: save_runs(make(rows, picks), args.to))
    such = " like that" if any(value is not None for value in asked.values()) or args.set else ""
    such = " of a sweep" if args.sweeps and not such else such
    return CommandAnswer(*run_list(rows, make(rows, picks), f"there is no run{such} in {folder}"))


def run_list(rows: list[dict[str, Any]], frame: pd.DataFrame, nothing: str = "") -> tuple[list[dict[str, Any]], str]:
    """The runs' facts, and their table without empty columns."""
    facts = [{name: value for name, value in row.items() if name not in {"config", "numbers"}} for row in rows]
    if not len(frame):
        return facts, nothing
    empty = [name for name in frame if (frame[name].isna() | (frame[name] == "")).all()]
    cells = readable(frame.drop(columns=[*empty, *ELSEWHERE], errors="ignore"), {})
    table = [list(map(str, cells)), *cells.to_numpy().tolist()]
    picks = frame.attrs.get("picks", ())
    whole = {*picks, "runs that passed"}  # what a person asked for, and the answers, are never cut
    least = {at: max(len(line[at]) for line in table) for at, name in enumerate(cells) if name in whole}
    if "verdict" in cells:
        answers = [str(row["verdict"]).partition(",")[0] for row in rows if row["answer"] != "not judged"]
        least[list(cells).index("verdict")] = max(map(len, [*answers, "verdict"])) + 1
    return facts, columns(table, width=terminal_width(0), least=least)


def label_command(args: argparse.Namespace) -> CommandAnswer:
    run = load_run(args.dir)
    run.label = args.text
    words = f"{run.id} is now labelled {run.label!r}" if run.label else f"{run.id} no longer has a label"
    return CommandAnswer({"run": str(run.dir), "label": run.label}, words)


def check_command(args: argparse.Namespace) -> CommandAnswer:
    folder = folder_of(args.dir)
    if args.junit:
        output_file(args.junit)
    run = results.Run(folder, rules=lambda _: find(args.lab).all_rules()) if args.lab else kit.load(folder)
    verdict, stored = run.verdict(), None
    if not any("verdict is damaged" in note for note in run.alterations):
        stored = run.stored_verdict()
    moved = verdict.changes(stored) if stored is not None and not args.lab else None
    status = 3 if run.broke else results.exit_code(verdict, strict=args.strict) or int(bool(run.alterations))
    if args.junit:
        print(f"JUnit: {write_junit([(run, verdict)], args.junit)}", file=sys.stderr)
    data, text = run_heading(run)
    text += f"\n\n{verdict}"
    if moved is not None:
        lines = ["differs from the stored verdict:", *moved] if moved else ["same as the stored verdict"]
        text += "\n\n" + "\n".join(lines)
    text = "\n".join([text, *unmeasured_notes(run, verdict, strict=args.strict)])
    return CommandAnswer({**data, "verdict": verdict.to_json(), "changes": moved, "exit": status}, text, status)


def run_heading(run: results.Run) -> tuple[dict[str, Any], str]:
    names = ("id", "lab", "status", "fault", "label")
    data = {"run": str(run.dir), **{name: getattr(run, name) for name in names}}
    about = {"label": run.label, "memory snapshots": memory_snapshots(run)}
    lines = [repr(run), *(f"{name}: {text}" for name, text in about.items() if text)]
    lines += [f"note: {note}" for note in run.notes]
    return {**data, "config": run.config, "notes": run.notes}, "\n".join(lines)


def show(args: argparse.Namespace) -> CommandAnswer:
    run = load_run(args.dir)
    data, text = run_heading(run)
    verdict, frame = run.shown_verdict(), run.frame()
    seconds = frame[frame["metric"] == "seconds"].dropna(subset=["value"]).groupby("phase", sort=False)["value"]
    times = seconds.agg(["count", *SPREAD]).reset_index()
    fault = {"fault": run.fault} if run.fault else {}
    stated = {name: value for name, value in flat({**run.config, **fault}).items() if value not in ("", None)}
    text = "\n".join([text, named_values(stated), "", repr(verdict)])
    if len(times):
        text += "\n\n" + table_text(times.rename(columns={"count": "n"}), dict.fromkeys(SPREAD, "s"))
    own = summary_of(frame) if run.own else frame.head(0)
    if len(own):
        units = dict.fromkeys(("first", "last", "min", "max"), ROW)
        text += "\n\nnumbers of the lab, over all ranks:\n" + table_text(own, units)
    return CommandAnswer({**data, "verdict": verdict.to_json(), "times": json_rows(times), "own": json_rows(own)}, text)


def compare_command(args: argparse.Namespace) -> CommandAnswer:
    runs = load_all(args.dirs)
    base, *compared = runs
    comparison = Comparison(runs)
    names = labelled(runs)
    lines = [f"compared with {names[base.id]}"]
    warned = [*comparison.warnings, *comparison.notes]
    lines += [f"warning: {text}" for text in warned]
    lines += [f"{name}: {' / '.join(values)}" for name, values in comparison.settings_in_words.items()]
    data: dict[str, Any] = {"base": base.id, "settings": comparison.settings, "warnings": warned, "runs": []}
    moved = comparison.changed
    for run in compared:
        answers = answers_changed(base, run)
        words = [[MARKS[row.passed].word if row else "not present" for row in rows] for _, *rows in answers]
        verdicts = [{"check": name, "base": was, "run": now_shown, "why": rows[1].why if rows[1] else ""}
                    for (name, *rows), (was, now_shown) in zip(answers, words, strict=True)]  # fmt: skip
        rows = moved[moved["run"] == run.id]
        shared = results.outcomes(base, run)
        total, differ, _, single = shared if comparison.same_lab else (0, 0, "", 0)
        answer = {"run": run.id, "verdicts": verdicts, "outcomes": total, "differ": differ, "in_one_run": single}
        data["runs"].append({**answer, "changed": json_rows(rows)})
        lines.append(f"\n{names[run.id]}\n{counted(len(verdicts), 'check') if verdicts else 'no check'} changed")
        if verdicts:
            cells = [[f"{row['base']} -> {row['run']}", row["check"], row["why"]] for row in verdicts]
            lines.append(columns(cells, width=terminal_width()))
        if total or single:
            lines.append(str(shared))
        first = ", largest against it first" if len(rows) else ""
        lines.append(f"{counted(len(rows), 'number')} changed by more than the spread{first}")
        if len(rows):
            lines.append(table_text(compact(rows.head(COMPARED_ROWS)), dict.fromkeys(("base", "value"), ROW)))
        if len(rows) > COMPARED_ROWS:
            lines.append(f"... and {len(rows) - COMPARED_ROWS} smaller changes: kit export DIR DIR --table compare")
    return CommandAnswer(data, "\n".join(lines))


def folder_of(word: Path | None) -> Path:
    """The folder that a word names. Without a word, print which run is taken, and which newer one is not."""
    folder = find_run(word)
    if word is None:
        newest = results.list_runs(results.runs_dir())[0]
        left_out = "" if newest == folder else f"; {newest.name} is newer and has not finished"
        print(f"kit: this is about {folder.name}{left_out}", file=sys.stderr)
    return folder


def load_run(word: Path | None) -> results.Run:
    return kit.load(folder_of(word))


def load_all(words: Sequence[Path | None]) -> list[results.Run]:
    """Return runs by folder or id: the newest finished one by default, and all runs of a sweep."""
    from kit.public import runs_of

    paths = [path for folder in map(folder_of, words or [None]) for path in runs_of(folder)]
    others = [path for path in paths if path.is_dir() and not (path / "run.json").exists()]
    if len(others) < len(paths):  # such as the folder of Worlds beside the runs
        for path in others:
            print(f"kit: {path} is left out: it is not a run", file=sys.stderr)
        paths = [path for path in paths if path not in others]
    return [kit.load(path) for path in paths]


# -- files -----------------------------------------------------------------------------------------------------------------


def export_command(args: argparse.Namespace) -> CommandAnswer:
    from kit.view.named import save_table

    if known_suffix(args.to, also=SETTINGS_SUFFIXES) in SETTINGS_SUFFIXES:
        return write_text_file(lambda: write_settings(load_all(args.dirs), args.to))
    return write_text_file(lambda: save_table(load_all(args.dirs), args.table, args.to))


def write_settings(runs: Sequence[results.Run], to: Path) -> Path:
    if len(runs) > 1:
        raise BadInput(f"{to.name} takes the settings of one run, not of {len(runs)}")
    run = runs[0]
    if run.fault:
        print(f"kit: {to.name} has the settings only; {run.id} ran with --fault {run.fault}", file=sys.stderr)
    about = f"settings of {run.id}" + (f", which ran with --fault {run.fault}" if run.fault else "")
    return save_settings(run.config, to, about)


def trace_command(args: argparse.Namespace) -> CommandAnswer:
    return write_text_file(lambda: results.write_trace(load_run(args.dir), args.to))


def report(args: argparse.Namespace) -> CommandAnswer:
    from kit.view.report import write_report

    return write_text_file(
        lambda: write_report(
            load_all(args.dirs), args.to, processes=min(2, os.cpu_count() or 1), tell=STILL_AT_WORK.note
        )
    )


def new(args: argparse.Namespace) -> CommandAnswer:
    from kit.starters import write_starter

    written = write_starter(args.kind, args.name, args.to or Path())
    names = [str(path) for path in written.files]
    text = "\n".join([*names, f"in that folder: {written.command}", f"or its test:    pytest {written.files[1].name}"])
    return CommandAnswer({"files": names, "command": written.command}, text)


def notebook(args: argparse.Namespace) -> CommandAnswer:
    from kit.view.notebooks import copy_all, on_terminal, run_notebook

    if (args.name is None) == (args.copy is None):
        raise BadInput("name a notebook to run, such as 01, or a folder for copies with --copy DIR")
    if args.copy is not None:
        copied = copy_all(args.copy)
        return CommandAnswer({"folder": str(copied)}, str(copied))
    path = run_notebook(args.name, dict(args.given), args.to, tell=on_terminal if sys.stderr.isatty() else None)
    return CommandAnswer({"file": str(path)}, str(path))


def write_text_file(write: Callable[[], Path]) -> CommandAnswer:
    """Write a file and return its path. An unwritable path is bad input, because no run broke."""
    try:
        path = write()
    except KitError as error:
        raise BadInput(str(error)) from error
    return CommandAnswer({"file": str(path)}, str(path))


# -- the machine -----------------------------------------------------------------------------------------------------------


def doctor(args: argparse.Namespace) -> CommandAnswer:
    from kit import doctor as room

    facts = room.examine()
    status = 1 if facts["problems"] else 0
    text = ""
    if not args.json:
        print(room.describe_box(facts), flush=True)
    if args.deep and status:
        print("kit: the probes need ranks, but ranks cannot run here", file=sys.stderr)
    elif args.deep:
        preflight = room.Preflight(print)
        (lab, *_) = tagged(room.TAG)
        answer = run_lab(lab, {"device": facts["ranks"]["device"]}, None, steps=preflight.run)
        facts["deep"], text, status = preflight.report(answer.data), answer.text, answer.status
    return CommandAnswer(facts, text, status)


def faults(args: argparse.Namespace) -> CommandAnswer:
    labs = [find(args.lab)] if args.lab else discover().labs.values()
    listed = [(lab.name, fault) for lab in labs for fault in lab.faults]
    rows = [
        {
            "lab": lab,
            "name": fault.name,
            "breaks": fault.breaks,
            "check": fault.caught_by,
            "exit": fault.exit,
            "set": fault.set,
            "devices": fault.devices,
            "bugs": fault.bugs,
        }
        for lab, fault in listed
    ]
    cells = []
    for lab, fault in listed:
        bugs = f" ({', '.join(fault.bugs)})" if fault.bugs else ""
        cells.append([lab, fault.name, fault.caught_by, str(fault.exit), fault.breaks + bugs])
    return CommandAnswer(rows, columns([["lab", "fault", "detected by", "exit", "what breaks"], *cells]))


def bench_command(args: argparse.Namespace) -> CommandAnswer:
    names = benches()
    if args.name not in names:
        raise BadInput(f"there is no bench {args.name!r}; {hint(args.name, names)}")
    from kit.results.samples import reported_rows, rows_text

    lab = find(f"{BENCH}-{args.name}")
    config = {"quick": args.quick, "parts": ",".join(args.part), "device": args.device}
    answer = run_lab(lab.name, config, args.out)
    data = {**reported_rows(kit.load(answer.data["run"]), lab.all_rules()), **answer.data}
    if answer.status < 2:  # a limit that was not met is a result; a bench that measured nothing has none
        data["exit"] = int(not any(row["n"] for row in data["rows"]))
    return CommandAnswer(data, f"{rows_text(data)}\nthe run is in {data['run']}", data["exit"])


def explore_command(args: argparse.Namespace) -> CommandAnswer:
    from kit.exploration import explorable, explore, replay
    from kit.labs.discover import from_text
    from kit.view.progress import told_on_terminal

    settings = from_text(explorable(args.lab), pairs("--set", args.set))
    if args.replay is not None:
        failure = replay(args.lab, args.replay, fault=args.fault, out=args.out, **settings)
        text = f"{failure.rule}: {failure.why}" if failure.rule else "no rule failed"
        data = {"findings": failure.findings, "events": failure.events, "run": str(failure.dir)}
        return CommandAnswer(data, f"{text}\nthe run is in {failure.dir}", int(bool(failure.rule)))
    if args.power:
        return power_of(args)
    options = {"first": args.first, "every": args.every, "jobs": args.jobs, "fault": args.fault, "out": args.out}
    with told_on_terminal("worlds") as tell:
        done = explore(args.lab, args.seeds, tell=tell, **options, **settings)
    status = 0 if done.passed else 1
    return CommandAnswer({**done.to_json(), "exit": status}, repr(done), status)


def power_of(args: argparse.Namespace) -> CommandAnswer:
    """How many known bugs the worlds of a lab show: the command fails if it is less than 95 % of those that they could."""
    from kit.exploration import power

    rows = []
    for row in power(args.lab, args.seeds, jobs=args.jobs):
        rows.append(row)
        seen = f"seed {row.seed}: {', '.join(row.failed)}" if row.seed is not None else row.beyond or "not found"
        print(f"{row.fault}  {seen}", file=sys.stderr, flush=True)
    possible = [row for row in rows if not row.beyond]
    seeded = [row for row in possible if row.seed is not None]
    share = len(seeded) / len(possible)
    text = f"{len(seeded)} of {len(possible)} known bugs found within {args.seeds} seeds ({share:.0%})"
    text += (
        f"; no world can show {', '.join(row.fault for row in rows if row.beyond)}" if len(possible) < len(rows) else ""
    )
    data = {
        "lab": args.lab,
        "seeds": args.seeds,
        "found": len(seeded),
        "of": len(possible),
        "rows": [asdict(row) for row in rows],
    }
    return CommandAnswer(data, text, int(share < 0.95))


def reference(args: argparse.Namespace) -> CommandAnswer:
    if args.out is None and not args.plan:
        raise BadInput("name a folder for the reference: --out DIR")
    from kit import reference as room

    if args.minutes is not None and not 0 < args.minutes <= MOST_MINUTES:
        raise BadInput(f"--minutes must be above 0 and at most {MOST_MINUTES}, not {args.minutes:g}")
    if args.pack:
        output_file(args.pack)
    asked = {"device": args.device, "minutes": args.minutes}
    status = room.print_plan(args.out, **asked) if args.plan else room.make_reference(args.out, pack=args.pack, **asked)
    return CommandAnswer({"out": str(args.out) if args.out else None, "exit": status}, status=status)


def clean_command(args: argparse.Namespace) -> CommandAnswer:
    from kit.doctor import clean

    return CommandAnswer(clean(dry_run=args.dry_run, yes=args.yes))


# -- tables on a terminal --------------------------------------------------------------------------------------------------


def table_text(frame: pd.DataFrame, units: Mapping[str, str]) -> str:
    texts = readable(frame, units)
    return columns([texts.columns.tolist(), *texts.to_numpy().tolist()], width=terminal_width())


def terminal_width(otherwise: int = WIDTH) -> int:
    """`otherwise` of a pipe; 0 cuts nothing."""
    return shutil.get_terminal_size((otherwise, 0)).columns


def named_values(values: Mapping[str, Any]) -> str:
    return " ".join(f"{name}={in_words(value)}" for name, value in flat(values).items())


# -- the commands and their options --------------------------------------------------------------------------------------


class CommandOption(NamedTuple):
    name: str
    how: dict[str, Any]
    names: Callable[..., Iterable[str]] | None = None


def flag(name: str, text: str) -> CommandOption:
    return CommandOption(name, {"action": "store_true", "help": text})


def command_option(
    name: str, metavar: Any, text: str, names: Callable[..., Iterable[str]] | None = None, **how: Any
) -> CommandOption:
    return CommandOption(name, {"metavar": metavar, "help": text, **how}, names)


def given_path(text: str) -> Path:
    try:
        return user_path(text)
    except BadInput as error:  # argparse shows the sentence of no other error
        raise argparse.ArgumentTypeError(str(error)) from None


def file(name: str, metavar: str, text: str, **how: Any) -> CommandOption:
    return command_option(name, metavar, text, type=given_path, **how)


def run_word(name: str, text: str, **how: Any) -> CommandOption:
    """The folder or the id of a run."""
    return command_option(name, "DIR", text, run_names, type=given_path, **how)


def device_option(text: str) -> CommandOption:
    return CommandOption("--device", {"help": text, "choices": ("auto", "cpu", "cuda"), "default": "auto"})


MANY: dict[str, Any] = {"action": "append", "default": []}
LAB = command_option("lab", "LAB", "the lab (`kit labs` lists them)", lab_names)
ONE_RUN = run_word("dir", "folder or id of a run; default: the newest finished run", nargs="?")
RUNS = run_word("dirs", "folders or ids of runs, or a sweep's folder; default: the newest finished run", nargs="*")
JSON = flag("--json", "print one JSON object on stdout and nothing else")
STRICT = flag("--strict", "count a check that was not measured as a failed one: exit status 1")
# For each command: its function, help text, examples, options.
COMMANDS: tuple[
    tuple[Callable[[argparse.Namespace], CommandAnswer], str, tuple[str, ...], tuple[CommandOption, ...]], ...
] = (
    (
        doctor,
        "show what this box can and cannot do, and why",
        ("", "--deep"),
        (flag("--deep", "also run the preflight: probes on live ranks, half a minute or more"),),
    ),
    (
        labs,
        "list the labs, or the settings of one lab",
        ("", "split"),
        (
            command_option("lab", "LAB", "list the settings of this lab", lab_names, nargs="?"),
            command_option("--tag", "TAG", "list the labs with this tag, such as bench", default=""),
        ),
    ),
    (
        run_command,
        "run a lab from its first phase to its verdict",
        (
            "smoke --set cycles=5 --fault leaked-group",
            "split --config run.yaml --set chunks=1,2",
            "share --from pipeline1.yaml --from pipeline2.yaml",
            "offload --sweep tp=1,2 --sweep mode=exact,abort --repeat 3 --out runs/sweep",
            "sync --like sync-20260101-120000-0a1b --junit sync.xml",
            "stream --log tensorboard:boards",
        ),
        (
            LAB,
            command_option(
                "--set", "KEY=VALUE", "a setting of the lab (`kit labs LAB`); may be repeated", setting_names, **MANY
            ),
            command_option(
                "--sweep",
                "KEY=V1,V2",
                "run once for each value of a setting, separated by commas; may be repeated",
                setting_names,
                **MANY,
            ),
            command_option("--repeat", "N", "run everything N times and report the spread", type=int, default=1),
            file("--config", "FILE", "settings from a JSON or YAML file; --set overrides them"),
            file(
                "--from",
                "FILE",
                "settings from the YAML of another system; one file for each pipeline, so it may be repeated",
                dest="foreign",
                **MANY,
            ),
            run_word("--like", "use the settings of this run; --config and --set override them"),
            command_option(
                "--fault", "NAME", "switch on a known bug (`kit faults` lists them), one per run", fault_names, **MANY
            ),
            file("--tolerances", "FILE", "limits of the checks from a JSON file: {name: number}"),
            file("--out", "DIR", "folder of the run or sweep; default: a new one in the runs folder"),
            file("--junit", "FILE", "also write the verdict as JUnit XML, for CI"),
            command_option(
                "--log",
                "TRACKER",
                f"also log the numbers to a tracker: {USAGE}; may be repeated",
                tracker_names,
                **MANY,
            ),
            STRICT,
        ),
    ),
    (
        runs_command,
        "list the runs, newest first",
        ("", "--lab offload --verdict failed --set tp=2", "--columns tp,memory_drift,reload/seconds --to runs.html"),
        (
            file("dir", "DIR", "a folder of runs, such as that of a sweep", nargs="?"),
            command_option("--lab", "LAB", "only runs of this lab", lab_names),
            command_option("--fault", "NAME", 'only runs with this fault; "": only those without one'),
            command_option("--status", "WORD", f"only runs that are {', '.join(ENDS)}"),
            command_option("--verdict", "WORD", f"only runs with this verdict: {', '.join(ANSWERS)}"),
            command_option("--set", "KEY=VALUE", "only runs with this setting; may be repeated", **MANY),
            command_option(
                "--columns",
                "A,B",
                "further columns: settings, checks (their number), PHASE/METRIC (the median)",
                default="",
            ),
            flag("--sweeps", "the settings of each sweep instead of its runs, with the spread of every number"),
            file(
                "--to",
                "FILE",
                "write the table: .html is a page to sort and filter offline; or .csv, .parquet, .md, .tex, .json",
            ),
        ),
    ),
    (
        label_command,
        "give a run a name or a note; an empty text removes it",
        ('smoke-20260101-120000-0a1b "new driver"',),
        (
            run_word("dir", "folder or id of a run"),
            command_option("text", "TEXT", "at most 120 characters"),
        ),
    ),
    (
        check_command,
        "judge a run again from its records",
        ("", "runs/mine --lab offload --junit checks.xml"),
        (
            ONE_RUN,
            command_option(
                "--lab", "LAB", "judge with this lab's checks, even if another system wrote the records", lab_names
            ),
            file("--junit", "FILE", "also write the stored verdict as JUnit XML"),
            STRICT,
        ),
    ),
    (show, "show a run: status, verdict, times", ("", "smoke-20260101-120000-0a1b"), (ONE_RUN,)),
    (
        compare_command,
        "compare runs with the first: changed verdicts, largest changes",
        ("runs/a runs/b",),
        (run_word("dirs", "folders or ids of runs, or a sweep's folder", nargs="+"),),
    ),
    (
        export_command,
        "write a table of runs as csv, parquet, md, tex, html or json",
        (
            "--to records.parquet",
            "runs/a --table verdict --to verdict.tex",
            "runs/a runs/b --table compare --to compare.md",
        ),
        (
            RUNS,
            command_option(
                "--table",
                "NAME",
                "records (default), verdict, times, memory, compare, or another table of the lab",
                default="records",
            ),
            file(
                "--to",
                "FILE",
                "output file; the suffix is the format; .yaml: the settings, for `kit run --config`",
                required=True,
            ),
        ),
    ),
    (
        trace_command,
        "write a run as a timeline for Perfetto or chrome://tracing",
        ("--to trace.json",),
        (ONE_RUN, file("--to", "FILE", "output file (JSON)", required=True)),
    ),
    (
        report,
        "write a page about runs: verdicts, pictures, tables",
        ("runs/a runs/b --to page.html",),
        (RUNS, file("--to", "FILE.html", "output file; needs no network", required=True)),
    ),
    (
        notebook,
        "run a notebook without a browser and save it with its outputs",
        ("01 -p cycles 5",),
        (
            command_option("name", "NAME", "01, 01_offload_reload, or a path", nargs="?"),
            file("--copy", "DIR", "copy all notebooks and docs to DIR; run none"),
            command_option(
                "-p", ("KEY", "VALUE"), "a parameter of the notebook; may be repeated", nargs=2, dest="given", **MANY
            ),
            file("--to", "FILE", "output file, .ipynb or .html; default: in the runs folder"),
        ),
    ),
    (
        new,
        "write a working file for your own code, the same with a bug, and their test",
        ("releaser my_releaser", "planner my_planner --to mine"),
        (
            command_option(
                "kind", "KIND", "releaser, trainer, transport, receiver, synchroniser, sampler, controller or planner"
            ),
            command_option("name", "NAME", "name of the module: NAME.py and test_NAME.py are written"),
            file("--to", "DIR", "folder for both files; default: the working directory"),
        ),
    ),
    (
        faults,
        "list the known bugs that can be switched on",
        ("", "smoke --json"),
        (command_option("lab", "LAB", "list the bugs of this lab only", lab_names, nargs="?"),),
    ),
    (
        bench_command,
        "measure alternative methods side by side",
        ("split --quick", "sync --part gpus"),
        (
            command_option("name", "NAME", "the bench (`kit labs --tag bench` lists them)", benches),
            flag("--quick", "measure less; takes a minute or two"),
            command_option("--part", "PART", "run only this part; X means every X.Y", **MANY),
            device_option("auto: the GPU if there is a driver"),
            file("--out", "DIR", "folder of the run; default: a new one in the runs folder"),
        ),
    ),
    (
        explore_command,
        "run a lab's cores, or your own, in random worlds on a virtual clock; make the first failure small",
        ("share --seeds 5000 --set planner=mine:planner", "share --fault late-shrink"),
        (
            LAB,
            command_option("--seeds", "N", "number of worlds (default 1000)", type=int, default=1000),
            command_option("--first", "SEED", "seed of the first world", type=int, default=0),
            command_option(
                "--set", "KEY=VALUE", "your own code as module:attr; may be repeated", setting_names, **MANY
            ),
            command_option("--fault", "NAME", "switch on a known bug of a core", fault_names),
            flag("--every", "do not end at the first failure"),
            flag("--power", "switch on every known bug of the lab's cores in turn, and say which seed shows it"),
            command_option("--replay", "WORLD", "run the world of this line again"),
            command_option("--jobs", "N", "processes; default: one for each core of this machine", type=int),
            file("--out", "DIR", "folder of the failure's run; default: a new one in the runs folder"),
        ),
    ),
    (
        reference,
        "run every lab and bench at this box's sizes; resumable",
        ("--out DIR", "--plan"),
        (
            file("--out", "DIR", "folder for the results"),
            flag("--plan", "print what each part took when it was last measured; run none"),
            device_option("auto: the device that ranks would use"),
            command_option("--minutes", "M", "start no part that would end later; default on a GPU: 8", type=float),
            file("--pack", "FILE.tgz", "also write one archive of at most 16 MiB"),
        ),
    ),
    (
        clean_command,
        "list and end leftovers of earlier runs; ends only processes that the kit started",
        ("--dry-run",),
        (flag("--yes", "end them without asking"), flag("--dry-run", "only list them")),
    ),
)


def parser() -> CommandParser:
    shape = argparse.RawDescriptionHelpFormatter
    top = CommandParser(
        prog="kit",
        description="Lifecycle Kit",
        epilog=(__doc__ or "").partition("\n\n")[2],
        allow_abbrev=False,
        usage="kit [-h] COMMAND ...",
        formatter_class=shape,
    )
    top.add_argument("--version", action="version", version=f"kit {kit.__version__}")
    commands = top.add_subparsers(metavar="COMMAND ...", required=True, prog="kit")
    for command, text, examples, options in COMMANDS:
        name = command.__name__.removesuffix("_command")
        shown = "\n".join(["examples:", *(f"  kit {name} {example}".rstrip() for example in examples)])
        made = commands.add_parser(
            name, help=text, description=text, allow_abbrev=False, epilog=shown, formatter_class=shape
        )
        made.set_defaults(command=command, parser=made)
        for option in (JSON, *options):
            made.add_argument(option.name, **option.how).completer = option.names  # type: ignore[attr-defined]
    return top
