"""Measures what the prefix cache itself costs: lookups, copies, CPU of long sessions.

No server runs. What the cache saves beside other servers, `hearth bench` tells.
"""

import argparse
import itertools
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.generate import generation_stream
from mlx_lm.models.cache import trim_prompt_cache

from hearth.shared.openblas_preload import openblas_environment
from hearth.shared.settings_from_env import load_settings
from hearth.worker.cache.block_hash import PrefixHash, Tokens, prefix_hashes
from hearth.worker.cache.cache_budget import MB, Budget
from hearth.worker.cache.conversation_priority import LinePriority
from hearth.worker.cache.extent_store import ExtentStore, Layout
from hearth.worker.cache.prefix_search import PrefixQuery, PrefixSearch
from hearth.worker.engine.prefill_lengths import default_chunk
from hearth.worker.prompt.prompt_with_sampled_turns import PromptBuilder, PromptContent
from hearth.worker.prompt.template_turn_tokens import end_of_turn_ids, turn_marks
from hearth.worker.setup.prompt_and_session_setup import make_builder
from scripts.harness.socketless_worker import Answer, Machine, loaded, machine

FIXTURE = "qwen3"
ABOUT = "what lookups, copies and cuts of the prefix cache cost"

Figures = dict[str, Any]

CHUNK = 256  # tokens between the cuts of the index figures
INDEX_TOKENS = (1_000, 10_000, 100_000)
INDEX_ROUNDS = 20
CONTEXT_TOKENS = 131_072
MESSAGES = 12
COPY_TOKENS, COPY_ROUNDS = 8_000, 5
SESSION_START_TOKENS, SESSION_TURN_TOKENS, SESSION_REQUESTS, SESSION_ENDS = 4_000, 300, 30, 5
BUDGET_MB = 4096
WORDS = ["".join(each) for each in itertools.product("bdfgklmnprstvz", "aeiou", repeat=2)]
ROOT = PrefixHash(b"root of the bench")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", help="one part: index, copies, session")


def run(options: argparse.Namespace) -> Figures:
    """Measure, printing each figure as it comes."""
    _preload_openblas()
    parts: dict[str, Callable[[], Figures]] = {
        "index": index_figures,
        "copies": copy_figures,
        "session": session_figures,
    }
    told: Figures = {"chunk": default_chunk()}
    for name in [options.only] if options.only else parts:
        told[name] = parts[name]()
        print(f"{name}: {json.dumps(_rounded(told[name]))}", flush=True)
    return told


def _preload_openblas() -> None:
    """Begin anew with the BLAS that workers have; it must be there before a process starts."""
    if more := openblas_environment(os.environ):
        os.execve(sys.executable, sys.orig_argv, os.environ | more)


def _rounded(figures: Any) -> Any:
    if isinstance(figures, dict):
        return {name: _rounded(value) for name, value in figures.items() if name != "values"}
    return float(f"{figures:.4g}") if isinstance(figures, float) else figures


# ---------------------------------------------------------------- lookup and commit


def index_figures() -> Figures:
    """Return ms to look a wholly kept prompt up, and to commit every cut of it."""
    return {f"{tokens}": _index_figures(tokens) for tokens in INDEX_TOKENS}


def _index_figures(token_count: int) -> Figures:
    rng = np.random.default_rng(token_count)
    tokens = rng.integers(0, 100_000, token_count, dtype=np.int32)
    cuts = [*range(CHUNK, token_count, CHUNK), token_count - 1]
    spent: dict[str, list[float]] = {"lookup_ms": [], "commit_ms": [], "hash_ms": []}
    for _ in range(INDEX_ROUNDS):
        store = ExtentStore(ROOT, Layout(has_state=False, window=0), Budget(BUDGET_MB * MB))
        start = time.perf_counter()
        names = prefix_hashes(ROOT, tokens, cuts)
        hashed = time.perf_counter()
        _commit(store, tokens, cuts, names)
        committed = time.perf_counter()
        query = PrefixQuery(tokens, cuts, prefix_hashes(ROOT, tokens, cuts))
        found = PrefixSearch(store, query, is_exact=False).run()
        searched = time.perf_counter()
        assert found.position == query.limit, (found.position, query.limit)
        spent["hash_ms"].append((hashed - start) * 1000)
        spent["commit_ms"].append((committed - start) * 1000)
        spent["lookup_ms"].append((searched - committed) * 1000)
    return {name: statistics.median(values) for name, values in spent.items()}


def _commit(
    store: ExtentStore, tokens: Tokens, cuts: Sequence[int], names: Sequence[PrefixHash]
) -> None:
    line = LinePriority(1, 0.0, 0.0)
    joint, start = store.root, 0
    for cut, name in zip(cuts, names, strict=True):
        joint, extent = store.commit(joint, name, tokens[start:cut].copy(), True, line)
        assert extent is not None
        extent.holders.add(0)
        start = cut


# ---------------------------------------------------------------- prompts


@cache
def builder() -> PromptBuilder:
    tokenizer = loaded(FIXTURE).tokenizer
    marks, ends = turn_marks(tokenizer), end_of_turn_ids(tokenizer, {})
    return make_builder(tokenizer, marks, ends, CONTEXT_TOKENS, load_settings({}, None))


@cache
def tokens_per_word() -> float:
    return len(loaded(FIXTURE).tokenizer.encode(" ".join(WORDS))) / len(WORDS)


def conversation(seed: str, *sizes: int) -> list[dict[str, str]]:
    """Return messages of random words, of about so many tokens each: system first, then in turns.

    With more sizes the first messages are the same.
    """
    rng = random.Random(seed)
    return [
        {
            "role": ("user", "assistant")[(number - 1) % 2] if number else "system",
            "content": " ".join(rng.choices(WORDS, k=max(1, round(size / tokens_per_word())))),
        }
        for number, size in enumerate(sizes)
    ]


def agent_sizes(tokens: int, messages: int) -> list[int]:
    """Return the sizes of so many messages; the system message is half of them, as with agents."""
    return [tokens // 2] + [tokens // 2 // (messages - 1)] * (messages - 1)


def ids_of(messages: list[dict[str, str]]) -> list[int]:
    return builder().build(PromptContent(messages, [])).ids


# ---------------------------------------------------------------- copies


def timed_calls(owner: Any, name: str) -> list[float]:
    """Return a list to which each call of a method of this one object adds its seconds."""
    seconds: list[float] = []
    method = getattr(owner, name)

    def timed(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        result = method(*args, **kwargs)
        seconds.append(time.perf_counter() - start)
        return result

    setattr(owner, name, timed)
    return seconds


def copy_figures() -> Figures:
    """Return ms per 1,000 tokens to commit, to cut out of a slot, and to restore into one.

    With one slot each prompt makes way for the next: opening the short one cuts the long one out,
    opening the long one again restores it.
    """
    spent: dict[str, list[float]] = {"commit": [], "cut_out": [], "restore": []}
    for number in range(COPY_ROUNDS):
        warm = machine(FIXTURE, chunk=default_chunk(), budget_mb=BUDGET_MB, slots_max=1)
        opens, commits = (timed_calls(warm.keeper, name) for name in ("open", "commit"))
        long = ids_of(conversation(f"long {number}", *agent_sizes(COPY_TOKENS, MESSAGES)))
        short = ids_of(conversation(f"short {number}", 20, 20))
        for name, ids, calls in (
            ("commit", long, commits),
            ("cut_out", short, opens),
            ("restore", long, opens),
        ):
            calls.clear()
            warm.ask(ids, 1)
            spent[name].append(sum(calls) * 1e6 / len(long))
        assert warm.keeper.counts["restored_tokens"] > 0.9 * len(long), warm.keeper.counts
    return {f"{name}_ms_per_1k": statistics.median(values) for name, values in spent.items()}


# ---------------------------------------------------------------- CPU


def session_figures() -> Figures:
    """Return CPU ms per newly prefilled token early and late in a growing session.

    Attention grows with length, so beside it stand the same forwards on one bare cache, which
    no KV manager touches: what a session costs at the least.
    """
    chunk = default_chunk()
    warm = machine(FIXTURE, chunk=chunk, budget_mb=BUDGET_MB)
    bare = _BareSession(warm)
    rows = []
    for number in range(SESSION_REQUESTS + 1):  # the first is the cold beginning
        turns = [SESSION_TURN_TOKENS] * 2 * number
        ids = ids_of(conversation("session", *agent_sizes(SESSION_START_TOKENS, 2), *turns))
        start = time.process_time()
        answer = warm.ask(ids, 1)
        spent = time.process_time() - start
        rows.append((answer.prefilled, spent, bare.follow(answer)))
    early, late = rows[1 : 1 + SESSION_ENDS], rows[-SESSION_ENDS:]
    return {
        "prompt_tokens_last": len(ids),
        "prefilled_a_request": statistics.median(row[0] for row in rows[1:]),
        "cpu_ms_per_token_first_5": _per_token_ms(early, 1),
        "cpu_ms_per_token_last_5": _per_token_ms(late, 1),
        "bare_ms_per_token_first_5": _per_token_ms(early, 2),
        "bare_ms_per_token_last_5": _per_token_ms(late, 2),
        "over_bare_first_5": _per_token_ms(early, 1) / _per_token_ms(early, 2),
        "over_bare_last_5": _per_token_ms(late, 1) / _per_token_ms(late, 2),
        "values": rows,
    }


def _per_token_ms(rows: Sequence[tuple[int, float, float]], column: int) -> float:
    return sum(row[column] for row in rows) * 1000 / sum(row[0] for row in rows)


class _BareSession:
    """The forwards of a session that only grows, on one cache with room for all of it."""

    def __init__(self, warm: Machine) -> None:
        self._engine = warm.engine
        with mx.stream(generation_stream):
            self._cache = warm.engine.new_cache()
            rows = SESSION_START_TOKENS + 2 * SESSION_REQUESTS * SESSION_TURN_TOKENS * 2
            warm.layers.reserve(self._cache, rows)

    def follow(self, answer: Answer) -> float:
        """Do what `answer` did in forwards; return its CPU seconds."""
        query, position = answer.request.query, answer.cached
        ends = [cut for cut in query.cuts if cut > position] + [len(query.tokens)]
        with mx.stream(generation_stream):
            held = self._cache[0].offset
            assert held >= position, (held, position)
            trim_prompt_cache(self._cache, held - position)
            start = time.process_time()
            for end in ends:
                self._engine.prefill(self._cache, query.tokens[position:end].tolist())
                position = end
            return time.process_time() - start
