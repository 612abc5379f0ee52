"""Makes results of given values, for tests of what is computed from them."""

from collections.abc import Mapping, Sequence
from typing import Final

from hearth.commands.bench.headline import KILLED, SUB_AGENTS
from hearth.commands.bench.results import HEARTH, ModelFacts, Results, ServerFacts

MODELS: Final = ("dense", "hybrid", "window", "vision")
Values = Mapping[str, float]


def empty_results(models: Sequence[str] = ("m",), servers: Sequence[str] = (HEARTH,)) -> Results:
    """Return results without a value."""
    results = Results("hearth bench", "a machine", "1.0", "abc", "full", 5, "2026-11-26T09:00:00")
    results.models = {model: ModelFacts(model, "text", "qwen3", 1_000) for model in models}
    results.servers = {name: ServerFacts(name, "1.0", "run {model}", True, []) for name in servers}
    return results


def flat_results(values: Mapping[tuple[str, str, str], Sequence[Values]]) -> Results:
    """Return results of values by model, server and workload, one of each for a round."""
    models, servers, _ = (list(dict.fromkeys(part)) for part in zip(*values, strict=True))
    results = empty_results(models, servers)
    for place, rounds in values.items():
        for number, each in enumerate(rounds):
            results.put(place, number, each)
    return results


def headline_results(others: int = 4) -> Results:
    """Return results that all figures can be made of; other servers read the more, the later."""
    servers = (HEARTH, *(f"other-{number}" for number in range(others)))
    found: dict[tuple[str, str, str], list[Values]] = {}
    for at, model in enumerate(MODELS):
        for rank, server in enumerate(servers):
            read = 1_000.0 + 10 * at + 500 * rank
            values = {"read_tokens": read, "ideal_tokens": 1_000.0, "prompt_tokens": 9_000.0}
            found |= {(model, server, name): [values] * 5 for name in (*SUB_AGENTS, *KILLED)}
    return flat_results(found)
