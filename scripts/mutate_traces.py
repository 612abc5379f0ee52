#!/usr/bin/env python
"""Checks that no request is answered from KV that hides a change which its client has made.

    python -m scripts.mutate_traces [TRACE ...] [--families qwen3,harmony] [--sample N]
    python -m scripts.mutate_traces [TRACE ...] --edits 500
    python -m scripts.mutate_traces [TRACE ...] --forwards 50
    python -m scripts.mutate_traces TRACE ... --excerpt OUT_DIR --requests 8 --chars 400

Sessions are primed with a captured session. Then each string that means something is changed in the
raw body of the last request that has it, and messages come, go and change their shape; the prompt
that comes of it is held to what sessions that know nothing make of the same (hidden_changes.py).
With --edits N, N random edits that a person could make on purpose in what was said, over all traces
together, are tried instead (deliberate_edits.py), and what became of each kind is told.
With --forwards a sample is computed too, conversations cut to some 4,000 tokens, and its log
probabilities are held to those of a cold run. --excerpt writes the sessions that the tests use.
Exit status 0: nothing is hidden; 1: something is; 2: there is no trace.
"""

import argparse
import dataclasses
import functools
import itertools
import json
import lzma
import random
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np

from hearth.commands.replay.shortened_sessions import shortened
from hearth.commands.replay.traces import TRACES_DIR, Captured, load_trace
from hearth.shared.wire_messages import Prompt
from hearth.worker.stream.detokenise import Vocabulary
from scripts.harness import captured_sessions
from scripts.harness.agent_worker import Desk
from scripts.harness.captured_sessions import Exchange
from scripts.harness.changes.body_mutations import Mutation, mutations
from scripts.harness.changes.hidden_changes import EXEMPT, FIXTURES, Proof, Verdict
from scripts.harness.model_families import family
from scripts.harness.socketless_worker import Answer, Machine, loaded

FAMILIES: Final = tuple(FIXTURES)
PROGRESS_S: Final = 20.0
FORWARD_CHARS: Final = 160  # of a text, and
FORWARD_REQUESTS: Final = 14  # of a session, so that conversations have some 4,000 tokens
ANSWER_TOKENS: Final = 8
CHUNK: Final = 256
# Generated KV is reused by default, and it is not what a prefill writes: log probabilities of fp32
# fixtures move by some 1e-5. A changed letter moves them by more than this in most places.
LOGPROB_TOLERANCE: Final = 1e-3


# ---------------------------------------------------------------- tensor-free


@dataclass
class Tally:
    """What became of all changes of one session."""

    name: str
    outcomes: Counter[str] = field(default_factory=Counter)
    findings: list[str] = field(default_factory=list)
    kinds: defaultdict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    began_s: float = field(default_factory=time.monotonic)
    told_s: float = 0.0

    def add(self, what: object, verdict: Verdict) -> None:
        self.outcomes[verdict.outcome] += 1
        if verdict.finding:
            self.findings.append(f"{self.name}: {what}: {verdict.finding}")
            print(self.findings[-1], flush=True)

    def progress(self, done: int, total: int) -> None:
        if time.monotonic() - self.told_s > PROGRESS_S:
            self.told_s = time.monotonic()
            print(f"{self.name}: {done:,} of {total:,}", file=sys.stderr, flush=True)

    def __str__(self) -> str:
        seconds = time.monotonic() - self.began_s
        rows = ", ".join(f"{name} {count:,}" for name, count in self.outcomes.most_common())
        return f"{self.name}: {self.outcomes.total():,} in {seconds:.0f} s: {rows}"


def prove(proof: Proof, name: str, sample: int) -> Tally:
    """Try every change, or `sample` of each kind (0 = all), and the requests as they were sent."""
    tally = Tally(name)
    for request, verdict in proof.unchanged():
        tally.add(request, verdict)
    jobs: list[tuple[object, Callable[[], Verdict]]] = [
        (mutation, functools.partial(proof.mutated, mutation))
        for mutation in sampled(proof.mutations(), sample)
    ]
    jobs += [
        (f"request {at} {kind}", functools.partial(proof.other_shape, at, kind, prompt))
        for at, kind, prompt in sampled(proof.reshaped(), sample)
    ]
    for number, (what, judge) in enumerate(jobs):
        tally.add(what, judge())
        tally.progress(number, len(jobs))
    return tally


def edited(proof: Proof, name: str, count: int) -> Tally:
    """Try `count` random edits of what was said."""
    tally = Tally(name)
    for edit in proof.edits(count):
        verdict = proof.edited(edit)
        tally.add(edit, verdict)
        tally.kinds[edit.kind][verdict.outcome] += 1
    return tally


def sampled(rows: list[Any], count: int, seed: int = 7) -> list[Any]:
    """Return `count` of the rows (0 = all), the same ones each time."""
    return random.Random(seed).sample(rows, count) if 0 < count < len(rows) else rows


# ---------------------------------------------------------------- with real forwards


@dataclass
class Computed:
    """One mutated request, warm and cold."""

    what: str
    prompt_tokens: int
    cached: int
    moved: float  # the first log probabilities, by the change: how much there was to notice
    finding: str = ""


class Forwards:
    """A short session, really played, and a model beside it that keeps nothing."""

    def __init__(
        self, session: Sequence[Exchange], family_name: str, logs: Path, is_exact: bool
    ) -> None:
        self.family, self.is_exact = family(family_name), is_exact
        self.session = [each for each in session if _is_writable(each, self.family.calls_max)]
        fixture = FIXTURES[family_name]
        self.desk = Desk(fixture, self.family, logs, chunk=CHUNK, is_exact=is_exact)
        captured_sessions.play(self.desk, self.session)
        self.desk.machine.is_scripted = False
        vocabulary = Vocabulary(self.family.tokenizer)
        self.cold = Machine(
            loaded(fixture, tiny=True),
            self.desk.marks,
            vocabulary,
            keeps=False,
            chunk=CHUNK,
            is_exact=is_exact,
        )

    def compute(self, mutation: Mutation) -> Computed:
        """Have a changed request answered from what is kept of the session, and cold."""
        exchange = self.session[mutation.request]
        self._warm(exchange.prompt)
        prompt = captured_sessions.prompt_of(exchange.row, mutation.body_of(exchange.row.body))
        warm = self._warm(prompt)
        ids = warm.request.ids
        cold = self.cold.ask(ids, ANSWER_TOKENS)
        before = self.cold.ask(self.desk.request(self.desk.named(exchange.prompt)).ids, 1)
        moved = float(np.abs(before.logits[0] - cold.logits[0]).max())
        finding = difference(warm, cold, self.is_exact)
        return Computed(str(mutation), len(ids), warm.cached, moved, finding)

    def _warm(self, prompt: Prompt) -> Answer:
        request = self.desk.request(self.desk.named(prompt))
        request.tokens_max = ANSWER_TOKENS
        answer = self.desk.machine.enter(request)
        self.desk.machine.run()
        return self.desk.machine.settled(answer)


def _is_writable(exchange: Exchange, calls_max: int | None) -> bool:
    return calls_max is None or len(exchange.parts.calls) <= calls_max


def difference(warm: Answer, cold: Answer, is_exact: bool) -> str:
    """Return how the answers differ; "" where they are one.

    Exact: to the bit. Else within LOGPROB_TOLERANCE, as long as both chose the same tokens: what
    follows a tie is another text.
    """
    if len(warm.logits) != len(cold.logits) and is_exact:
        return f"{len(warm.logits)} tokens instead of {len(cold.logits)}"
    for number, (mine, theirs) in enumerate(zip(warm.logits, cold.logits, strict=False)):
        apart = float(np.abs(mine - theirs).max())
        if apart > (0.0 if is_exact else LOGPROB_TOLERANCE):
            return f"log probabilities of token {number} are {apart:.2g} apart"
        if mine.argmax() != theirs.argmax():
            return ""
    return ""


def compute_all(traces: Sequence[list[Captured]], count: int, logs: Path) -> list[Computed]:
    """Compute `count` changes, spread over traces, families and modes."""
    computed: list[Computed] = []
    plans = [(rows, FAMILIES[n % len(FAMILIES)]) for n, rows in enumerate(traces)]
    for number, (rows, family_name) in enumerate(plans):
        share = count * (number + 1) // len(plans) - count * number // len(plans)
        session = captured_sessions.exchanges(
            shortened(rows[:FORWARD_REQUESTS], FORWARD_CHARS, tools=2)
        )
        began = time.monotonic()
        for is_exact, part in ((True, (share + 1) // 2), (False, share // 2)):
            forwards = Forwards(session, family_name, logs, is_exact)
            for mutation in spread(forwards.session, part, seed=2 * number + is_exact):
                computed.append(forwards.compute(mutation))
                row = computed[-1]
                print(_computed_row(rows[0].trace, family_name, is_exact, row), flush=True)
        print(f"{rows[0].trace} {family_name}: {time.monotonic() - began:.0f} s", file=sys.stderr)
    return computed


def spread(session: Sequence[Exchange], count: int, seed: int) -> list[Mutation]:
    """Return `count` changes of a session, two thirds of them of what was said."""
    found = list(mutations([exchange.row.body for exchange in session]))
    tools = [mutation for mutation in found if mutation.where[0] == "tools"]
    others = [mutation for mutation in found if mutation.where[0] != "tools"]
    chance = random.Random(seed)
    return chance.sample(others, count - count // 3) + chance.sample(tools, count // 3)


def _computed_row(trace: str, family_name: str, is_exact: bool, row: Computed) -> str:
    mode = "exact" if is_exact else "default"
    return (
        f"{trace} {family_name} {mode}: {row.what}: {row.cached:,} of {row.prompt_tokens:,} "
        f"tokens reused, moved by {row.moved:.2g}: {row.finding or 'as cold'}"
    )


# ---------------------------------------------------------------- the command


def write_excerpt(rows: list[Captured], out: Path, requests: int, chars: int) -> None:
    """Write the first `requests` of a session, its texts cut, as a trace that load_trace reads."""
    lines = []
    for row in shortened(rows[:requests], chars):
        path, _, query = row.path.partition("?")
        kept = dataclasses.asdict(row)
        lines.append(
            {"t": row.began_s, "t_end": row.ended_s, "method": "POST", "path": path, "query": query}
            | {name: kept[name] for name in ("headers", "body", "response")}
        )
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    out.mkdir(parents=True, exist_ok=True)
    target = out / f"{rows[0].trace}.jsonl.xz"
    target.write_bytes(lzma.compress(text.encode(), preset=9 | lzma.PRESET_EXTREME))
    print(f"{target}: {target.stat().st_size:,} bytes")


def options_of(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("traces", nargs="*", type=Path, metavar="TRACE", help="default: all")
    parser.add_argument("--families", default="qwen3_5", help=f"of {','.join(FAMILIES)}")
    parser.add_argument("--sample", type=int, default=0, metavar="N", help="of each kind; 0 = all")
    parser.add_argument("--edits", type=int, default=0, metavar="N", help="deliberate edits")
    parser.add_argument("--forwards", type=int, default=0, metavar="N", help="computed changes")
    parser.add_argument("--excerpt", type=Path, metavar="OUT_DIR")
    parser.add_argument("--requests", type=int, default=8, help="of an excerpt")
    parser.add_argument("--chars", type=int, default=400, help="of a text in an excerpt")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = options_of(arguments)
    paths = options.traces or sorted(TRACES_DIR.glob("*.jsonl.xz"))
    traces = [load_trace(path) for path in paths]
    if not traces:
        print(f"there are no traces in {TRACES_DIR}", file=sys.stderr)
        return 2
    if options.excerpt is not None:
        for rows in traces:
            write_excerpt(rows, options.excerpt, options.requests, options.chars)
        return 0
    with tempfile.TemporaryDirectory() as logs:
        if options.forwards:
            return report_computed(compute_all(traces, options.forwards, Path(logs)))
        families = options.families.split(",")
        share = -(-options.edits // (len(traces) * len(families)))
        tallies = []
        for rows, family_name in itertools.product(traces, families):
            proof = Proof(captured_sessions.exchanges(rows), family_name, Path(logs))
            name = f"{rows[0].trace} {family_name}"
            tallies.append(
                edited(proof, name, share) if share else prove(proof, name, options.sample)
            )
            print(tallies[-1], flush=True)
    return report(tallies)


def report(tallies: Sequence[Tally]) -> int:
    """Print the sum and why what does not reach the model need not; return the exit status."""
    total = sum((tally.outcomes for tally in tallies), Counter[str]())
    for name, why in EXEMPT.items():
        if total[name]:
            print(f"  {name} ({total[name]:,}): {why}")
    for kind in sorted({kind for tally in tallies for kind in tally.kinds}):
        found = sum((tally.kinds[kind] for tally in tallies), Counter[str]())
        print(f"  {kind}: " + ", ".join(f"{name} {count}" for name, count in found.most_common()))
    findings = [finding for tally in tallies for finding in tally.findings]
    print(f"{total.total():,} prompts, {len(findings):,} hide something")
    return 1 if findings else 0


def report_computed(rows: Sequence[Computed]) -> int:
    findings = [row for row in rows if row.finding]
    reused = sum(row.cached for row in rows) / max(1, sum(row.prompt_tokens for row in rows))
    noticed = sum(row.moved > LOGPROB_TOLERANCE for row in rows)
    print(
        f"{len(rows):,} changes computed, {reused:.0%} of their tokens reused, {noticed:,} move "
        f"the answer by more than the tolerance, {len(findings):,} differ from a cold run"
    )
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
