"""Begins the results of a run, or goes on with those of an interrupted one; never mixes two."""

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Final

from hearth.commands.bench.results import Results
from hearth.commands.bench.rounds.machine_facts import commit, machine_text, now
from hearth.commands.bench.rounds.model_facts import BenchModel
from hearth.commands.bench.rounds.plan import ChosenServer
from hearth.commands.bench.workload import Scale
from hearth.shared.errors import StartError
from hearth.shared.version import VERSION

# What must be the same in all samples of a file.
_SAME: Final = ("version", "commit", "scale", "machine")


def begun(command: str, scale: Scale, rounds: int) -> Results:
    """Return the results of a run that begins now, without any sample."""
    return Results(
        command=command,
        machine=machine_text(),
        version=VERSION,
        commit=commit(),
        scale=scale.name,
        rounds=rounds,
        began=now(),
    )


def resumed(
    path: Path, fresh: Results, models: Sequence[BenchModel], servers: Sequence[ChosenServer]
) -> Results:
    """Return what `path` holds, to be gone on with; `fresh` where there is no such file.

    Raises:
        StartError: the file is of another run, whose figures must not stand beside these.
    """
    if not path.exists():
        return fresh
    try:
        found = Results.load(path)
    except (OSError, ValueError) as error:
        raise StartError(f"{error}. {_REMEDY}") from None
    if differing := differences(found, fresh, models, servers):
        raise StartError(
            f"{path} is of another run, and figures of two are not mixed: "
            f"{'; '.join(differing)}. {_REMEDY}"
        )
    found.command, found.rounds = fresh.command, max(found.rounds, fresh.rounds)
    return found


_REMEDY: Final = "Give another file by --json, or remove this one."


def differences(
    found: Results, fresh: Results, models: Sequence[BenchModel], servers: Sequence[ChosenServer]
) -> list[str]:
    """Return each thing that is not as it was when `found` was measured."""
    told = []
    for name in _SAME:
        before, after = getattr(found, name), getattr(fresh, name)
        if before != after:
            told.append(f"{name} was {before or 'not known'} and is {after or 'not known'}")
    for model in models:
        earlier = found.models.get(model.facts.label)
        if earlier is not None and earlier != model.facts:
            odd = [
                each.name
                for each in fields(earlier)
                if getattr(earlier, each.name) != getattr(model.facts, each.name)
            ]
            told.append(f"{model.facts.label} has other {', '.join(odd)}")
    for each in servers:
        facts = found.servers.get(each.server.name)
        if facts is not None and each.is_there and facts.version != each.version:
            told.append(f"{each.server.name} was {facts.version} and is {each.version}")
    return told
