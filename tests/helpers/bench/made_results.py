"""Makes up the results of a run of `hearth bench`: for pages, comparisons and their tests."""

import random
from collections.abc import Sequence
from typing import Final

from hearth.commands.bench.results import HEARTH, ModelFacts, Results, Sample, ServerFacts

MODELS: Final = {
    "qwen3": ModelFacts("qwen3-fp32", "dense", "qwen3", 16_000_000),
    "qwen3_5": ModelFacts("qwen3_5-fp32", "hybrid", "qwen3_5", 19_000_000),
    "gpt_oss": ModelFacts("gpt_oss-fp32", "window", "gpt_oss", 22_000_000),
    "qwen3_5_vl": ModelFacts("qwen3_5_vl-fp32", "vision", "qwen3_5", 24_000_000),
}
SERVERS: Final = (HEARTH, "mlx_lm", "mlx_vlm", "vllm-mlx", "rapid-mlx")
COUNTED: Final = (
    *(
        "linear",
        "sub-agents",
        "shared-trunk",
        "claude-code",
        "forks-and-edits",
        "cancel-0s",
        "cancel-3s",
        "live",
    ),
    *("restart", "kill", "day", "images"),
)
TIMED: Final = ("streams-1", "streams-4", "streams-16", "beside-long", "structured")
# How many times the ideal each server reads, and its seconds and memory beside Hearth's.
READS: Final = dict(zip(SERVERS, (1.0, 1.02, 1.9, 2.6, 1.25), strict=True))
SLOWER: Final = dict(zip(SERVERS, (1.0, 0.96, 1.3, 1.2, 1.1), strict=True))
MEMORY: Final = dict(zip(SERVERS, (544e6, 209e6, 266e6, 252e6, 329e6), strict=True))
# A server that loses what it read with its process, or for a client that has gone.
FORGETS: Final = {"mlx_lm": ("restart", "kill"), "vllm-mlx": ("restart", "kill", "day")}
ABOUTS: Final = {name: f"What {name} does, in one sentence." for name in (*COUNTED, *TIMED)}


def made_results(
    *, models: Sequence[str] = tuple(MODELS), servers: Sequence[str] = SERVERS, rounds: int = 5
) -> Results:
    """Return results as a run leaves them; the same ones for the same arguments."""
    results = Results(
        command="hearth bench --model qwen3 --model qwen3_5 --servers hearth,mlx_lm --rounds 5",
        machine="AMD EPYC 7B13, 2 cores, 8 GB, Linux 6.1",
        version="0.9.1",
        commit="f3cea59a00112233",
        scale="full",
        rounds=rounds,
        began="2026-11-26T09:40:00+00:00",
        models={name: MODELS[name] for name in models},
        servers={name: _facts(name) for name in servers},
    )
    for number in range(rounds):
        for model in models:
            for server in servers:
                if (model, server) != ("qwen3_5", "mlx_vlm"):  # it does not load hybrid text models
                    results.add(made_samples(model, server, number))
    return results


def made_samples(model: str, server: str, number: int) -> list[Sample]:
    """Return the samples of one visit."""
    chance = random.Random(f"{model} {server} {number}")
    names = [*COUNTED, *TIMED, "answers", "at-rest"]
    if MODELS[model].kind != "vision":
        names = [name for name in names if "image" not in name]
    return [_sample(model, server, name, number, chance) for name in names]


def _facts(name: str) -> ServerFacts:
    notes = ("It does not load text-only hybrid models: `TypeError`.",) if name == "mlx_vlm" else ()
    command = f"python -m {name}.server --model {{model}} --port {{port}}"
    return ServerFacts(name, "0.32.2", command, name != "rapid-mlx", notes)


def _sample(model: str, server: str, workload: str, number: int, chance: random.Random) -> Sample:
    values: dict[str, float] = {
        "cpu_s": 4.0 * SLOWER[server] * chance.uniform(0.93, 1.07),
        "memory_bytes": MEMORY[server] * chance.uniform(0.99, 1.02),
        "written_bytes": 3e6 * chance.uniform(0.9, 1.1) if server == HEARTH else 0.0,
        "wall_s": 5.0 * SLOWER[server] * chance.uniform(0.9, 1.1),
    }
    errors: tuple[str, ...] = ()
    if workload in COUNTED:
        values |= _counted(model, server, workload, chance)
        if (server, workload) == ("vllm-mlx", "images"):
            values["failed"], errors = 2.0, ("500 <Internal> & worse",)
    elif workload in TIMED:
        values |= _timed(server, workload, chance)
    elif workload == "answers":
        values["same_answers"] = 1.0 if server != "vllm-mlx" else 0.75
    return Sample(model, server, workload, number, values, (), errors, 0.3, "2026-11-26T09:41:00")


def _counted(model: str, server: str, workload: str, chance: random.Random) -> dict[str, float]:
    prompt = 24_000 * random.Random(workload + model).uniform(0.4, 1.6)
    ideal = prompt * {"restart": 0.001, "kill": 0.001}.get(workload, 0.3)
    read = ideal * READS[server] * chance.uniform(1.0, 1.004)
    if workload in FORGETS.get(server, ()):
        read = prompt
    if workload.startswith("cancel"):
        read = prompt * {HEARTH: 1.06, "mlx_lm": chance.uniform(0.7, 1.5)}.get(server, 1.9)
    wait = 0.05 + read / prompt * SLOWER[server] * chance.uniform(0.92, 1.08)
    longer = 1.4 if (server, model) == ("mlx_vlm", "qwen3_5_vl") else 1.0
    return {
        "read_tokens": round(read),
        "ideal_tokens": round(ideal),
        "prompt_tokens": round(prompt * longer),
        "requests": 10.0,
        "failed": 0.0,
        "ttft_p50_s": wait,
        "ttft_p95_s": 3 * wait,
    }


def _timed(server: str, workload: str, chance: random.Random) -> dict[str, float]:
    streams = int(workload.rpartition("-")[2]) if workload[-1].isdigit() else 3
    speed = 290 * streams**0.6 / SLOWER[server] * chance.uniform(0.85, 1.15)
    values = {
        "tokens_s": speed,
        "gap_p50_s": streams / speed,
        "gap_p99_s": 4 * streams / speed * chance.uniform(0.7, 1.5),
        "ttft_p50_s": 0.2 * SLOWER[server] * chance.uniform(0.9, 1.1),
        "forwards_per_token": 1.0 / streams,
    }
    if workload == "structured":
        values["valid_share"] = (
            1.0 if server in (HEARTH, "rapid-mlx") else chance.choice((0.0, 0.1))
        )
    return values
