"""Measures Hearth beside other servers on models of yours, and writes one page and one JSON file.

    hearth bench --quick --model qwen3.5-9b              four short rounds, on what is installed
    hearth bench --model qwen3.5-9b --model gpt-oss-20b  all workloads, five rounds: overnight
    hearth bench --servers hearth,mlx_lm --server mine=http://127.0.0.1:8000
    hearth bench --page hearth-bench.json                makes the page anew
    hearth bench --compare before.json after.json        tells which lines moved

It says what it will take and asks before it begins. A run that was interrupted goes on where it
was when the same command is given again. Both files can be shared: they hold no prompts, no
answers, no paths and no names of people or machines.
Exit status 0: it is done; 2: it cannot begin, or the answer was no; 130: it was interrupted.
"""

import argparse
import asyncio
import shlex
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from hearth.commands.bench.measures import MEASURES
from hearth.commands.bench.page.bench_page import bench_page
from hearth.commands.bench.page.causes import Causes
from hearth.commands.bench.rank_test import chance_moved
from hearth.commands.bench.results import HEARTH, ROUNDS_MAX, Results
from hearth.commands.bench.rounds.all_workloads import ALL_WORKLOADS, chosen_workloads
from hearth.commands.bench.rounds.calibration import Rates, calibrated
from hearth.commands.bench.rounds.file_lock import has_other_runs, sole_writer
from hearth.commands.bench.rounds.interrupts import interrupts, run_interruptible
from hearth.commands.bench.rounds.machine_facts import computing_servers
from hearth.commands.bench.rounds.model_facts import chosen_models
from hearth.commands.bench.rounds.plan import Plan, minutes
from hearth.commands.bench.rounds.progress import Progress
from hearth.commands.bench.rounds.resumed_results import begun, resumed
from hearth.commands.bench.rounds.server_choice import by_url, chosen_servers, with_installed
from hearth.commands.bench.rounds.visit_rounds import Course, Rounds, SaveError
from hearth.commands.bench.servers.found_servers import found_servers
from hearth.commands.bench.servers.known_servers import SERVERS
from hearth.commands.bench.statistics import moved, paired
from hearth.commands.bench.workload import SCALES, Scale
from hearth.shared.errors import StartError

CANNOT_BEGIN: Final = 2
INTERRUPTED: Final = 128 + signal.SIGINT
_QUICK: Final = "quick"
_FULL: Final = "full"
_DEFAULT_JSON: Final = "hearth-bench.json"


def options_of(
    arguments: Sequence[str] | None = None, scales: Mapping[str, Scale] = SCALES
) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="hearth bench",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    many: dict[str, Any] = {"action": "append", "default": []}
    parser.add_argument(
        "--model", metavar="X", help="hub id, name or directory; repeatable", **many
    )
    parser.add_argument("--servers", metavar="A,B", default="", help="of those that it knows")
    parser.add_argument(
        "--server", metavar="NAME=URL", help="one that runs already; NAME is published", **many
    )
    parser.add_argument("--workloads", metavar="A,B", default="", help="default: all")
    parser.add_argument("--quick", action="store_true", help="minutes, not hours")
    parser.add_argument("--scale", choices=list(scales), help="how long sessions are")
    parser.add_argument("--rounds", type=_count, metavar="N", help="default: the scale's")
    parser.add_argument("--json", type=Path, metavar="FILE", default=Path(_DEFAULT_JSON))
    parser.add_argument("--html", type=Path, metavar="FILE", help="default: beside the JSON")
    parser.add_argument("--causes", type=Path, metavar="FILE", help="why lines are behind")
    parser.add_argument("--yes", action="store_true", help="do not ask")
    parser.add_argument(
        "--busy", action="store_true", help="though another Hearth or run computes here"
    )
    parser.add_argument("--page", type=Path, metavar="FILE", help="make the page of this JSON")
    parser.add_argument("--compare", type=Path, nargs=2, metavar=("A", "B"))
    return parser.parse_args(arguments)


def _count(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text[:9]) <= ROUNDS_MAX:
        raise argparse.ArgumentTypeError(f"it is a number from 1 to {ROUNDS_MAX}")
    return int(text)


def main(arguments: Sequence[str] | None = None, scales: Mapping[str, Scale] = SCALES) -> int:
    options = options_of(arguments, scales)
    try:
        if options.compare:
            return _compare(*options.compare)
        if options.page:
            results = Results.load(options.page)
            return _say_written(_page(results, options.page, options))
        _html_path(options, options.json)
        with interrupts(), sole_writer(options.json):
            return _measure(options, scales)
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr)
        return INTERRUPTED
    except StartError as error:
        print(error, file=sys.stderr)
    except (OSError, ValueError) as error:  # a file that cannot be read or written
        print(f"{error}", file=sys.stderr)
    return CANNOT_BEGIN


def _measure(options: argparse.Namespace, scales: Mapping[str, Scale]) -> int:
    """Plan, ask, and play all rounds; what is there is written however it ends."""
    _causes(options)  # a mistake in them is told now, not hours later
    plan = _plan(options, scales)
    print("\n".join(plan.lines()), flush=True)
    if plan.missing():
        if not (options.yes or _is_agreed()):
            return CANNOT_BEGIN
        status = _play(plan, options)
    else:
        status = 0
    _say_written(_page(plan.results, plan.json_path, options))
    return status


def _plan(options: argparse.Namespace, scales: Mapping[str, Scale]) -> Plan:
    """Return what is going to be done; nothing is installed and nothing written by then."""
    models = chosen_models(options.model or ["builtin:pocket"])
    scale = scales[options.scale or (_QUICK if options.quick else _FULL)]
    is_quick = options.quick or scale.name == _QUICK
    found = {server.name: server for server in asyncio.run(found_servers())}
    urls = by_url(options.server)
    # One that is named by its owner is not found once more.
    known = SERVERS | {
        name: server
        for name, server in found.items()
        if all(server.url != each.url for each in urls)
    }
    servers = chosen_servers(_names(options.servers), urls, known, is_quick=is_quick)
    workloads = chosen_workloads(_names(options.workloads), is_quick=is_quick)
    course = Course(
        models, [each.server for each in servers], workloads, scale, options.rounds or scale.rounds
    )
    fresh = begun(typed(options, course), scale, course.rounds)
    results = resumed(options.json, fresh, models, servers)
    plan = Plan(course, servers, results, options.json, _html_path(options, options.json))
    warnings = _warnings(options, plan)
    rates = _rates(plan) if plan.missing() else {}
    return replace(plan, rates=rates, warnings=warnings)


def _warnings(options: argparse.Namespace, plan: Plan) -> list[str]:
    """Return what a reader of the plan must know.

    Raises:
        StartError: another server or run computes, and that is not said to be meant.
    """
    warnings = []
    pids = ", ".join(str(pid) for pid in computing_servers())
    busy = [f"Another Hearth server computes on this machine (pid {pids})"] if pids else []
    if has_other_runs(plan.json_path):
        busy.append("Another `hearth bench` runs on this machine")
    for text in busy:
        if not options.busy:
            raise StartError(f"{text}: nothing can be measured beside it. Wait, or give --busy.")
        warnings.append(f"{text}. Times will be those of a busy machine; the page tells the load.")
    if all(server.name != HEARTH for server in plan.course.servers):
        warnings.append("Without hearth there is no ideal, and nothing to compare with.")
    return warnings


def _rates(plan: Plan) -> dict[str, Rates]:
    """Return how fast each model is here, by the first server that can be started at once."""
    first = next((each for each in plan.servers if each.is_there and not each.server.url), None)
    if first is None:
        return {}
    rates = {}
    for model in plan.course.models:
        label = model.facts.label
        _say(f"Measures how fast {label} is here, by {first.server.name} ...")
        try:
            rates[label] = run_interruptible(calibrated(first.server, model))
        except Exception as error:  # a server may fail in any way; then no time is told
            _say(f"That is not known: {error}")
    return rates


def _play(plan: Plan, options: argparse.Namespace) -> int:
    """Install what is missing and play; return the exit status. Each sample is saved at once."""
    results, path = plan.results, plan.json_path
    for each in plan.servers:
        if not each.is_there:
            _say(f"Installs {each.server.package} ...")
    servers = with_installed(plan.servers, results)
    for name in {each.server.name for each in plan.servers} - {each.name for each in servers}:
        _say(f"{name}: {' '.join(results.servers[name].notes[-1:])}")
    if not servers:
        raise StartError("No server is left to be measured.")
    results.models |= {model.facts.label: model.facts for model in plan.course.models}
    results.save(path)
    course = replace(plan.course, servers=servers)
    progress = Progress(course, results, plan.rates, _say)
    rounds = Rounds(course, results, lambda: results.save(path), progress.tell)
    began = time.monotonic()
    try:
        run_interruptible(rounds.play())
    except KeyboardInterrupt:
        _say("Interrupted. The same command goes on where it was.")
        return INTERRUPTED
    except SaveError as error:
        raise StartError(f"{error}. Make room; the same command goes on where it was.") from None
    _say(f"Done in {minutes(time.monotonic() - began)}; {rounds.errors} errors are on the page.")
    return 0


def _page(results: Results, json_path: Path, options: argparse.Namespace) -> Path:
    """Write the page of `results`; return where."""
    path = _html_path(options, json_path)
    abouts = {workload.name: workload.about for workload in ALL_WORKLOADS}
    # A directory's name may have bytes that are no text.
    page = bench_page(results, _causes(options), abouts)
    path.write_text(page, encoding="utf-8", errors="replace")
    return path


def _causes(options: argparse.Namespace) -> Causes | None:
    path: Path | None = options.causes
    return None if path is None else Causes.parsed(path.read_text(encoding="utf-8"))


def _say_written(path: Path) -> int:
    print(f"The page is {path}")
    return 0


def _compare(one: Path, other: Path) -> int:
    before, after = Results.load(one), Results.load(other)
    lines, pairs = moved(before, after), paired(before, after)
    for each in lines:
        unit = MEASURES[each.measure].unit
        print(
            f"{each.model}, {each.server}, {each.workload}: {MEASURES[each.measure].label} "
            f"{each.before.median:g} -> {each.after.median:g} {unit}"
        )
    if not lines:
        print("No line moved by more than its spread.")
    # Without it a reader takes for a change what any two runs of so many lines show.
    loose = [each for each in pairs if any(one.low < one.high for one in (each.before, each.after))]
    chance = sum(chance_moved(len(each.before.values), len(each.after.values)) for each in loose)
    print(
        f"{len(lines)} of {len(pairs)} lines moved. If nothing had changed, up to {chance:.0f} "
        f"would by chance, of the {len(loose)} whose rounds differ."
    )
    return 0


def _html_path(options: argparse.Namespace, json_path: Path) -> Path:
    """Return where the page is written.

    Raises:
        StartError: it would replace the results.
    """
    path: Path = options.html or json_path.with_suffix(".html")
    if path.resolve() == json_path.resolve():
        raise StartError(f"The page would replace {json_path}. Name another file by --html.")
    return path


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def typed(options: argparse.Namespace, course: Course) -> str:
    """Return the command that makes the same run, without paths."""
    words = ["hearth", "bench"]
    for model in course.models:
        words += ["--model", model.facts.label]
    local = [server.name for server in course.servers if not server.url]
    words += ["--servers", ",".join(local)] if local else []
    for server in course.servers:
        words += ["--server", f"{server.name}=URL"] if server.url else []
    words += ["--workloads", options.workloads] if options.workloads else []
    words += ["--quick"] if options.quick else []
    words += ["--scale", course.scale.name] if options.scale else []
    return shlex.join([*words, "--rounds", str(course.rounds)])


def _is_agreed() -> bool:
    """Ask; a closed or empty stdin is a no."""
    print("Begin? [y/N] ", end="", flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
