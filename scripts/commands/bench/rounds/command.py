"""Measures Hearth beside other servers on models of yours, and writes one page and one JSON file.

    hearth bench                                         smollm2, four short rounds (--quick)
    hearth bench --quick --model qwen3.5-9b              the same of another model
    hearth bench --model qwen3.5-9b --model gpt-oss-20b  all workloads, five rounds: overnight
    hearth bench --servers hearth,mlx_lm --server mine=http://127.0.0.1:8000
    hearth bench --page hearth-bench.json                makes the page anew
    hearth bench --compare before.json after.json        tells which lines moved

A run that was interrupted goes on where it was when the same command is given again. The files hold
no prompts and no answers; an error is the end of a server's log: read it before you share them.
Exit status 0: it is done; 2: it cannot begin; 130: it was interrupted.
"""

import argparse
import asyncio
import shlex
import signal
import sys
from collections.abc import Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from hearth.commands.bench.page import Causes, bench_page, parsed_causes
from hearth.commands.bench.results import HEARTH, ROUNDS_MAX, Results, ServerFacts
from hearth.commands.bench.rounds.all_workloads import ALL_WORKLOADS, chosen_workloads
from hearth.commands.bench.rounds.machine_facts import commit, machine_text, now
from hearth.commands.bench.rounds.model_facts import chosen_models
from hearth.commands.bench.rounds.visit_rounds import Course, play
from hearth.commands.bench.servers.known_servers import SERVERS, chosen_servers
from hearth.commands.bench.servers.server_environment import command_of, program_of, version_of
from hearth.commands.bench.statistics import moved
from hearth.commands.bench.workload import SCALES, Scale
from hearth.shared.errors import StartError
from hearth.shared.settings import DEFAULT_MODEL
from hearth.shared.version import VERSION

CANNOT_BEGIN: Final = 2
INTERRUPTED: Final = 128 + signal.SIGINT
# What must be the same in all of a file: figures of two runs are not mixed.
_SAME: Final = ("version", "commit", "scale", "machine")


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
    parser.add_argument("--servers", metavar="A,B", default="", help=f"of {', '.join(SERVERS)}")
    parser.add_argument(
        "--server", metavar="NAME=URL", help="one that runs already; NAME is published", **many
    )
    parser.add_argument("--workloads", metavar="A,B", default="", help="default: all")
    parser.add_argument("--quick", action="store_true", help="minutes, not hours")
    parser.add_argument("--scale", choices=list(scales), help="how long sessions are")
    rounds = range(1, ROUNDS_MAX + 1)
    parser.add_argument("--rounds", type=int, choices=rounds, help="default: the scale's")
    parser.add_argument("--json", type=Path, metavar="FILE", default=Path("hearth-bench.json"))
    parser.add_argument("--html", type=Path, metavar="FILE", help="default: beside the JSON")
    parser.add_argument("--causes", type=Path, metavar="FILE", help="why lines are behind")
    parser.add_argument("--page", type=Path, metavar="FILE", help="make the page of this JSON")
    parser.add_argument("--compare", type=Path, nargs=2, metavar=("A", "B"))
    options = parser.parse_args(arguments)
    options.html = options.html or (options.page or options.json).with_suffix(".html")
    if options.html in (options.json, options.page):
        parser.error(f"the page would replace {options.html}; name another file by --html")
    return options


def main(arguments: Sequence[str] | None = None, scales: Mapping[str, Scale] = SCALES) -> int:
    options = options_of(arguments, scales)
    try:
        if options.compare:
            told, count = moved(*map(Results.load, options.compare))
            print("\n".join((*told, f"{len(told)} of {count} lines moved; 4.8 % do by chance.")))
            return 0
        # A mistake in them is told now, not hours later.
        causes = parsed_causes(options.causes.read_text("utf-8")) if options.causes else {}
        if options.page:
            _write_page(Results.load(options.page), options, causes)
            return 0
        course = _course(options, scales)
        results = _begun(options, course)
        print("\n".join(_plan(course, results)), flush=True)
        try:
            asyncio.run(_interruptible(play(course, results, options.json)))
        finally:
            _write_page(results, options, causes)
        return 0
    except (KeyboardInterrupt, asyncio.CancelledError):
        print("Interrupted. The same command goes on where it was.", file=sys.stderr)
        return INTERRUPTED
    except (StartError, OSError, ValueError) as error:  # or a file that cannot be used
        print(error, file=sys.stderr)
    return CANNOT_BEGIN


def _course(options: argparse.Namespace, scales: Mapping[str, Scale]) -> Course:
    is_quick = options.quick or not options.model  # the longer ones exceed the default's context
    scale = scales[options.scale or ("quick" if is_quick else "full")]
    return Course(
        chosen_models(options.model or [DEFAULT_MODEL]),
        chosen_servers(_names(options.servers), options.server),
        chosen_workloads(_names(options.workloads), is_quick=scale.name == "quick"),
        scale,
        options.rounds or scale.rounds,
    )


def _begun(options: argparse.Namespace, course: Course) -> Results:
    """Return the results that the file holds already, to be gone on with; else empty ones.

    Raises:
        StartError: the file is of another run, whose figures must not stand beside these.
    """
    fresh = Results(
        command=_typed(options, course),
        machine=machine_text(),
        version=VERSION,
        commit=commit(),
        scale=course.scale.name,
        rounds=course.rounds,
        began=now(),
    )
    fresh.models = {model.facts.label: model.facts for model in course.models}
    for server in course.servers:
        told = version_of(server), command_of(server), False, list(server.notes)
        fresh.servers[server.name] = ServerFacts(server.name, *told)
    if not options.json.exists():
        return fresh
    found = Results.load(options.json)
    before = {name: getattr(found, name) for name in _SAME}
    after = {name: getattr(fresh, name) for name in _SAME}
    before |= {name: found.models[name] for name in fresh.models if name in found.models}
    before |= {name: found.servers[name].version for name in fresh.servers if name in found.servers}
    after |= {**fresh.models, **{name: each.version for name, each in fresh.servers.items()}}
    if differing := [f"{name} was {old}" for name, old in before.items() if old != after[name]]:
        raise StartError(
            f"{options.json} is of another run: {'; '.join(differing)}. Give another file by "
            "--json, or remove this one."
        )
    found.command, found.rounds = fresh.command, max(found.rounds, fresh.rounds)
    found.models, found.servers = fresh.models | found.models, fresh.servers | found.servers
    return found


def _plan(course: Course, results: Results) -> list[str]:
    """Return what is going to be done, as it is told before it begins."""
    absent = [
        f"{each.name} ({each.install})"
        for each in SERVERS.values()
        if each not in course.servers and each.install and program_of(each) is None
    ]
    names = [each.name for each in course.servers]
    return [
        *(f"Server {name}: {results.servers[name].version}" for name in names),
        *([f"Not here: {', '.join(absent)}"] if absent else []),
        *(["Without hearth there is no ideal, and nothing is compared."] * (HEARTH not in names)),
        f"Models: {', '.join(model.facts.label for model in course.models)}",
        f"Workloads ({course.scale.name}): {', '.join(each.name for each in course.workloads)}",
        f"{len(course.missing(results))} of {len(course.visits())} visits are left to be played.",
    ]


async def _interruptible(playing: Coroutine[Any, Any, None]) -> None:
    """Have SIGTERM and a closed terminal end the run as Ctrl-C does, with the server it started."""
    task = asyncio.ensure_future(playing)
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # `nohup` outlives its terminal
            asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    await task


def _write_page(results: Results, options: argparse.Namespace, causes: Causes) -> None:
    path: Path = options.html
    abouts = {workload.name: workload.about for workload in ALL_WORKLOADS}
    # A directory's name may have bytes that are no text.
    page = bench_page(results, causes, abouts)
    path.write_text(page, encoding="utf-8", errors="replace")
    print(f"The page is {path}")


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _typed(options: argparse.Namespace, course: Course) -> str:
    """Return the command that makes the same run, without paths."""
    words = ["hearth", "bench"]
    for model in course.models:
        words += ["--model", model.facts.label]
    named = [each.name for each in course.servers if each.name in SERVERS]
    words += ["--servers", ",".join(named)]
    words += [f"--server={each.name}=URL" for each in course.servers if each.name not in SERVERS]
    words += ["--workloads", options.workloads] if options.workloads else []
    words += ["--scale", course.scale.name, "--rounds", str(course.rounds)]
    return shlex.join(words)


if __name__ == "__main__":
    sys.exit(main())
