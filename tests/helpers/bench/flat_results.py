"""Makes results of given values, for tests of what is computed from them."""

from collections.abc import Mapping, Sequence
from typing import Final

from hearth.commands.bench.headline import FIGURES
from hearth.commands.bench.results import HEARTH, ModelFacts, Results, Sample, ServerFacts

KINDS: Final = ("dense", "hybrid", "window", "vision")
Values = Mapping[str, float]


def empty_results(models: Sequence[str] = ("m",), servers: Sequence[str] = (HEARTH,)) -> Results:
    """Return results without a sample."""
    results = Results("hearth bench", "a machine", "1.0", "abc", "full", 5, "2026-11-26T09:00:00")
    for model, kind in zip(models, KINDS * len(models), strict=False):
        results.models[model] = ModelFacts(model, kind, "qwen3", 1_000)
    for server in servers:
        results.servers[server] = ServerFacts(server, "1.0", "run {model}", True)
    return results


def flat_results(samples: Mapping[tuple[str, str, str], Sequence[Values]]) -> Results:
    """Return results of values by model, server and workload, one of each for a round."""
    models, servers, _ = (list(dict.fromkeys(part)) for part in zip(*samples, strict=True))
    results = empty_results(models, servers)
    results.add(
        Sample(*key, number, values)
        for key, rounds in samples.items()
        for number, values in enumerate(rounds)
    )
    return results


def headline_results(others: int = 4) -> Results:
    """Return results that all figures can be made of; other servers read the more, the later."""
    servers = (HEARTH, *(f"other-{number}" for number in range(others)))
    samples: dict[tuple[str, str, str], list[Values]] = {}
    for at, model in enumerate(KINDS):
        for rank, server in enumerate(servers):
            for figure in FIGURES:
                read = 1_000.0 + 10 * at + 500 * rank
                values = {"read_tokens": read, "ideal_tokens": 1_000.0, "prompt_tokens": 9_000.0}
                samples |= {(model, server, name): [values] * 5 for name in figure.workloads}
    return flat_results(samples)
