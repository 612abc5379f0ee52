"""Measures what the prefix cache itself costs: lookups, copies, kept bytes, CPU of long sessions.

No server runs. What the cache saves beside other servers, `hearth bench` tells.
"""

import argparse
import json
import os
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.generate import generation_stream
from mlx_lm.models.cache import trim_prompt_cache

from hearth.commands.replay.ideal_cache import ideal_cached
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

ABOUT = "what lookups, copies and cuts of the prefix cache cost"
FIXTURES = "qwen3,qwen3_5,gpt_oss"

Figures = dict[str, Any]

CHUNK = 256  # tokens between the cuts of the index figures
INDEX_TOKENS = (1_000, 10_000, 100_000)
INDEX_ROUNDS = 20
CONTEXT_TOKENS = 131_072
COLD_TOKENS, COLD_MESSAGES = 5_700, 12
TRUNK_TOKENS, BRANCHES, BRANCH_TOKENS = 8_000, 8, 500
COPY_TOKENS, COPY_ROUNDS = 8_000, 5
SESSION_START_TOKENS, SESSION_TURN_TOKENS, SESSION_REQUESTS, SESSION_ENDS = 4_000, 300, 30, 5
BUDGET_MB = 4096
ROOT = PrefixHash(b"root of the bench")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--fixtures", default=FIXTURES, help="for the cold request; others: qwen3")
    parser.add_argument("--pairs", type=int, default=20, help="of the cold-request comparison")
    parser.add_argument("--only", help="one part: index, copies, bytes, session, cold")
    parser.add_argument("--json", type=Path)


def run(options: argparse.Namespace) -> None:
    """Measure, printing each figure as it comes, and write the JSON."""
    _preload_openblas()
    parts: dict[str, Callable[[], Figures]] = {
        "index": index_figures,
        "copies": copy_figures,
        "bytes": byte_figures,
        "session": session_figures,
        "cold": lambda: {
            name: cold_figures(name, options.pairs) for name in options.fixtures.split(",")
        },
    }
    told: Figures = {"chunk": default_chunk()}
    for name in [options.only] if options.only else parts:
        told[name] = parts[name]()
        print(f"{name}: {json.dumps(_rounded(told[name]))}", flush=True)
    if options.json:
        options.json.write_text(json.dumps(told, indent=1) + "\n")


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
def builder(fixture: str) -> PromptBuilder:
    tokenizer = loaded(fixture).tokenizer
    marks, ends = turn_marks(tokenizer), end_of_turn_ids(tokenizer, {})
    return make_builder(tokenizer, marks, ends, CONTEXT_TOKENS, load_settings({}, None))


class Conversation:
    """Messages of random words, about as many tokens each as asked for, and their prompt."""

    def __init__(self, fixture: str, seed: str) -> None:
        self._builder = builder(fixture)
        self._rng = random.Random(seed)
        self.messages: list[dict[str, str]] = []
        sample = " ".join(self._word() for _ in range(200))
        self._tokens_per_word = self._length(sample) / 200

    def add(self, tokens: int) -> "Conversation":
        """Add the next message; roles take turns, system first."""
        roles = ("user", "assistant")
        role = roles[(len(self.messages) - 1) % 2] if self.messages else "system"
        count = max(1, round(tokens / self._tokens_per_word))
        self.messages.append({"role": role, "content": " ".join(self._words(count))})
        return self

    def ids(self, *more: dict[str, str]) -> list[int]:
        return self._builder.build(PromptContent([*self.messages, *more], [])).ids

    def _length(self, text: str) -> int:
        return len(self._builder.build(PromptContent([{"role": "user", "content": text}], [])).ids)

    def _words(self, count: int) -> list[str]:
        return [self._word() for _ in range(count)]

    def _word(self) -> str:
        syllables = (self._rng.choice("bdfgklmnprstvz") + self._rng.choice("aeiou") for _ in "ab")
        return "".join(syllables)


def conversation(fixture: str, seed: str, tokens: int, messages: int) -> Conversation:
    """Return one of so many messages; the system message is half of it, as with agents."""
    made = Conversation(fixture, seed).add(tokens // 2)
    for _ in range(messages - 1):
        made.add(tokens // 2 // (messages - 1))
    return made


# ---------------------------------------------------------------- copies


class Meter:
    """Sums what calls of some methods cost: seconds of wall and CPU, and how often."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.wall_s: Counter[str] = Counter()

    def watch(self, owner: Any, *names: str) -> None:
        """Time calls of the methods `names` of this one object from now on."""
        for name in names:
            setattr(owner, name, self._timed(name, getattr(owner, name)))

    def _timed(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return method(*args, **kwargs)
            finally:
                self.wall_s[name] += time.perf_counter() - start  # type: ignore[assignment]
                self.counts[name] += 1

        return timed


def copy_figures() -> Figures:
    """Return ms per 1,000 tokens to commit, to cut out of a slot, and to restore into one.

    With one slot each prompt makes way for the next: opening the short one cuts the long one out,
    opening the long one again restores it.
    """
    spent: dict[str, list[float]] = {"commit": [], "cut_out": [], "restore": []}
    for number in range(COPY_ROUNDS):
        warm = machine("qwen3", chunk=default_chunk(), budget_mb=BUDGET_MB, slots_max=1)
        meter = Meter()
        meter.watch(warm.keeper, "open", "commit")
        long = conversation("qwen3", f"long {number}", COPY_TOKENS, COLD_MESSAGES).ids()
        short = conversation("qwen3", f"short {number}", 40, 2).ids()
        warm.ask(long, 1)
        thousands = len(long) / 1000
        spent["commit"].append(meter.wall_s["commit"] * 1000 / thousands)
        spent["cut_out"].append(_opening_s(warm, meter, short) * 1000 / thousands)
        spent["restore"].append(_opening_s(warm, meter, long) * 1000 / thousands)
        assert warm.keeper.counts["restored_tokens"] > 0.9 * len(long), warm.keeper.counts
    return {f"{name}_ms_per_1k": statistics.median(values) for name, values in spent.items()}


def _opening_s(warm: Machine, meter: Meter, ids: list[int]) -> float:
    before = meter.wall_s["open"]
    warm.ask(ids, 1)
    return float(meter.wall_s["open"] - before)


def byte_figures() -> Figures:
    """Return kept bytes over those of every distinct token: a trunk and its branches."""
    warm = machine(
        "qwen3",
        chunk=default_chunk(),
        budget_mb=BUDGET_MB,
        slots_max=4,
        session_idle_s=1e-9,  # `sweep` empties the slots at once
    )
    trunk = conversation("qwen3", "trunk", TRUNK_TOKENS, COLD_MESSAGES + 1)
    prompts = []
    for number in range(BRANCHES):
        branch = Conversation("qwen3", f"branch {number}").add(BRANCH_TOKENS).messages[0]
        prompts.append(trunk.ids({"role": "user", "content": branch["content"]}))
        warm.ask(prompts[-1], 1)
    shared = ideal_cached(prompts)
    distinct = sum(len(p) - s for p, s in zip(prompts, shared, strict=True) if s is not None)
    wanted = distinct * warm.layers.row_bytes
    live = sum(warm.keeper.slot_bytes(slot) for slot in warm.keeper.slots)
    beside = warm.keeper.store.budget.bytes_used
    time.sleep(0.01)
    with mx.stream(generation_stream):
        warm.keeper.sweep()
    assert not warm.keeper.slots
    kept = warm.keeper.store.budget.bytes_used
    return {
        "distinct_tokens": distinct,
        "trunk_and_branches_bytes": wanted,
        "kept_ratio": kept / wanted,
        "kept_and_live_ratio_before": (beside + live) / wanted,
    }


# ---------------------------------------------------------------- CPU


def cold_figures(fixture: str, pairs: int) -> Figures:
    """Return the CPU of a cold request with a KV manager over that without one, in pairs."""
    chunk = default_chunk()
    keeping = machine(fixture, chunk=chunk, budget_mb=BUDGET_MB)
    bare = machine(fixture, chunk=chunk, keeps=False)
    meters = []
    for one in (keeping, bare):
        meters.append(Meter())
        meters[-1].watch(one.engine, "prefill")
    ratios, spent = [], {"keeper": 0.0, "none": 0.0}
    token_count = kept = 0
    for number in range(-1, pairs):  # the first pair warms up
        ids = conversation(fixture, f"cold {number}", COLD_TOKENS, COLD_MESSAGES).ids()
        order = [("keeper", keeping), ("none", bare)]
        cpu = {name: _cpu_s(one, ids) for name, one in order[:: 1 if number % 2 else -1]}
        if number >= 0:
            ratios.append(cpu["keeper"] / cpu["none"])
            spent = {name: spent[name] + cpu[name] for name in spent}
        token_count = len(ids)
        kept = keeping.keeper.store.budget.bytes_used
        with mx.stream(generation_stream):
            keeping.scheduler.forget()
    return {
        "tokens": token_count,
        "cpu_ratio": statistics.median(ratios),
        "cpu_ratio_of_sums": spent["keeper"] / spent["none"],
        "cpu_s": spent["none"] / pairs,
        "forwards": meters[0].counts["prefill"] / (pairs + 1),
        "forwards_without": meters[1].counts["prefill"] / (pairs + 1),
        "store_bytes": kept,  # windows and states; rows stay in the slot
        "cut_out_bytes": keeping.keeper.counts["cut_out_bytes"],
        "values": ratios,
    }


def _cpu_s(one: Machine, ids: list[int]) -> float:
    start = time.process_time()
    answer = one.ask(ids, 1)
    spent = time.process_time() - start
    assert answer.cached == 0, answer.usage
    return spent


def session_figures() -> Figures:
    """Return CPU ms per newly prefilled token early and late in a growing session.

    Attention grows with length, so beside it stand the same forwards on one bare cache, which
    no KV manager touches: what a session costs at the least.
    """
    chunk = default_chunk()
    warm = machine("qwen3", chunk=chunk, budget_mb=BUDGET_MB)
    bare = _BareSession(warm)
    talk = conversation("qwen3", "session", SESSION_START_TOKENS, 2)
    rows = []
    for _ in range(SESSION_REQUESTS + 1):  # the first is the cold beginning
        ids = talk.ids()
        start = time.process_time()
        answer = warm.ask(ids, 1)
        spent = time.process_time() - start
        rows.append((answer.prefilled, spent, bare.follow(answer)))
        talk.add(SESSION_TURN_TOKENS).add(SESSION_TURN_TOKENS)
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
