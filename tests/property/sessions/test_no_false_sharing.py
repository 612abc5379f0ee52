"""Nothing that a client changed is hidden by a record, a canonical rule or a remembered text.

On excerpts of real sessions (tests/data/traces) and on live ones; scripts/mutate_traces.py tries
every change of every session, and takes ten minutes a family. Attacks that once hid something stand
in tests/unit/worker/sessions/test_echo_attacks.py.
"""

import functools
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hearth.commands.replay.shortened_sessions import shortened
from hearth.commands.replay.traces import Captured, load_trace
from hearth.proxy.request.volatile_fields import canonical_text
from hearth.shared.wire_messages import Prompt
from hearth.worker.cache.block_hash import PrefixHash
from hearth.worker.stream.detokenise import Vocabulary
from scripts.harness import captured_sessions
from scripts.harness.agent_worker import Desk
from scripts.harness.captured_sessions import Exchange
from scripts.harness.changes.body_mutations import Mutation, mutations
from scripts.harness.changes.deliberate_edits import COMING_AND_GOING
from scripts.harness.changes.hidden_changes import EXEMPT, FIXTURES, Proof, Verdict
from scripts.harness.model_families import family
from scripts.harness.socketless_worker import Answer, Machine, loaded
from scripts.mutate_traces import sampled
from tests.helpers.clients.client_echoes import CLIENTS, CWD
from tests.helpers.servers.live_sessions import SCRIPT, TOOLS, exchanges_of

TRACES = Path(__file__).parents[2] / "data" / "traces"
STRINGS = 60  # changes tried of one session
STRINGS_AT_NIGHT = 200
SHAPES = 80
NIGHT = pytest.mark.night
CHUNK, ANSWER_TOKENS = 256, 8
# Generated KV is reused by default, and it is not what a prefill writes: log probabilities of fp32
# fixtures move by some 1e-5. A changed letter moves them by more than this in most places.
LOGPROB_TOLERANCE = 1e-3
CASES = {
    "claude-code-session-1": "qwen3_5",
    "codex-session-1": "harmony",
    "openclaw-session-1": "qwen3",
}


@functools.cache
def session(name: str) -> list[Exchange]:
    return captured_sessions.exchanges(load_trace(TRACES / f"{name}.jsonl.xz"))


@pytest.fixture(scope="module", params=CASES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def proof(name: str, tmp_path_factory: pytest.TempPathFactory) -> Proof:
    return Proof(session(name), CASES[name], tmp_path_factory.mktemp("logs"))


@pytest.fixture
def fresh(tmp_path: Path) -> Callable[..., Proof]:
    """Return what makes a proof on Claude Code's session, for those that break something."""

    def make(family_name: str = "qwen3_5", **options: str) -> Proof:
        return Proof(session("claude-code-session-1")[:8], family_name, tmp_path, options)

    return make


def outcomes(verdicts: Iterator[tuple[str, Verdict]]) -> Counter[str]:
    """Return how often each outcome came; fails where something is hidden."""
    rows = list(verdicts)
    found = [f"{what}: {verdict.finding}" for what, verdict in rows if verdict.finding]
    assert not found, "\n".join(found)
    return Counter(verdict.outcome for _, verdict in rows)


# ---------------------------------------------------------------- nothing is hidden


def test_requests_as_they_were_sent_hold_what_was_sent_or_sampled(proof: Proof) -> None:
    assert set(outcomes(proof.unchanged())) == {"as sent"}
    written = [span for span in proof.records if len(span) > 1]
    assert len(written) >= len(proof.session) - 1, "turns were recorded, so that they could hide"
    assert proof.tokens["reused"] > 0.9 * proof.tokens["planned"] > 0


@pytest.mark.parametrize("count", [STRINGS, pytest.param(STRINGS_AT_NIGHT, marks=NIGHT)])
def test_no_changed_string_number_or_key_is_hidden(proof: Proof, count: int) -> None:
    tried = sampled(proof.mutations(), count)
    found = outcomes((str(mutation), proof.mutated(mutation)) for mutation in tried)
    assert found.keys() <= {"shown", "in the ids", *EXEMPT}
    assert found["shown"] > len(tried) / 3, found


def test_no_message_tool_or_call_that_comes_or_goes_is_hidden(proof: Proof) -> None:
    shapes = [edit for edit in proof.edits(0) if edit.kind in COMING_AND_GOING]
    tried = sampled(shapes, SHAPES)
    assert {edit.kind for edit in tried} >= COMING_AND_GOING - {"results deleted"}
    found = outcomes((str(edit), proof.edited(edit)) for edit in tried)
    assert found.keys() <= {"in the ids", "shown", "refused"}, found
    assert found["in the ids"] > len(tried) / 2, found


def test_no_date_reminder_or_other_volatile_line_is_hidden(proof: Proof) -> None:
    """Canonical names leave them out; the model must see them as they were sent."""
    volatile = [mutation for mutation in proof.mutations() if mutation.kind == "volatile"]
    found = outcomes((str(m), proof.mutated(m)) for m in volatile)
    assert found["shown"] > 0 and found.keys() <= {"shown", "telemetry"}, found


# ---------------------------------------------------------------- the proof sees what is wrong


def findings(proof: Proof, wanted: Callable[[Mutation], bool], count: int = 12) -> list[str]:
    tried = sampled([mutation for mutation in proof.mutations() if wanted(mutation)], count)
    return [verdict.finding for verdict in map(proof.mutated, tried) if verdict.finding]


def test_it_sees_canonical_text_that_the_model_is_shown(
    fresh: Callable[..., Proof], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt_of = captured_sessions.prompt_of

    def canonical(*row: Any) -> Prompt:
        prompt = prompt_of(*row)
        messages = [
            message | {"content": canonical_text(message["role"], message["content"])[0]}
            for message in prompt.messages
        ]
        return replace(prompt, messages=messages)

    proof = fresh()
    monkeypatch.setattr(captured_sessions, "prompt_of", canonical)
    proof.session = [replace(each, prompt=canonical(each.row)) for each in proof.session]
    proof.plain = [
        (proof.seen(proof.warm, e.prompt), proof.seen(proof.cold, e.prompt)) for e in proof.session
    ]
    found = findings(proof, lambda m: m.kind == "volatile" and m.where[0] == "messages")
    assert "no prompt shows it" in found


def test_it_sees_a_plan_whose_names_do_not_tell_prompts_apart(
    fresh: Callable[..., Proof], monkeypatch: pytest.MonkeyPatch
) -> None:
    def by_length(root: PrefixHash, tokens: Any, ends: Any) -> list[PrefixHash]:
        return [PrefixHash(root + str(end).encode()) for end in ends]

    monkeypatch.setattr("hearth.worker.threads.request_builder.prefix_hashes", by_length)
    found = findings(fresh(), lambda m: m.where[0] == "tools" and m.kind == "letter")
    assert any("KV of other tokens" in finding for finding in found)


# ---------------------------------------------------------------- with real forwards


class Forwards:
    """A short session, really played, and a model beside it that keeps nothing."""

    def __init__(self, rows: list[Captured], name: str, logs: Path, is_exact: bool) -> None:
        spoken, fixture = family(name), FIXTURES[name]
        most = spoken.calls_max or 99
        session = captured_sessions.exchanges(rows)
        self.session = [each for each in session if len(each.parts.calls) <= most]
        self._is_exact = is_exact
        self._desk = Desk(fixture, spoken, logs, chunk=CHUNK, is_exact=is_exact)
        captured_sessions.play(self._desk, self.session)
        self._desk.machine.is_scripted = False
        how: dict[str, Any] = {"keeps": False, "chunk": CHUNK, "is_exact": is_exact}
        model, words = loaded(fixture, tiny=True), Vocabulary(spoken.tokenizer)
        self._cold = Machine(model, self._desk.marks, words, **how)

    def compute(self, mutation: Mutation) -> tuple[Answer, float]:
        """Have a changed request answered from what is kept of the session, and hold it to cold.

        Return the answer, and by how much the change moved the first log probabilities.
        """
        exchange = self.session[mutation.request]
        before = self._warm(exchange.prompt).request.ids
        body = mutation.body_of(exchange.row.body)
        warm = self._warm(captured_sessions.prompt_of(exchange.row, body))
        cold = self._cold.ask(warm.request.ids, ANSWER_TOKENS)
        assert len(warm.logits) == len(cold.logits) or not self._is_exact
        for mine, theirs in zip(warm.logits, cold.logits, strict=False):
            apart = float(np.abs(mine - theirs).max())
            assert apart <= (0.0 if self._is_exact else LOGPROB_TOLERANCE), str(mutation)
            if mine.argmax() != theirs.argmax():
                break  # what follows a tie is another text
        plain = self._cold.ask(before, 1)
        return warm, float(np.abs(plain.logits[0] - cold.logits[0]).max())

    def _warm(self, prompt: Prompt) -> Answer:
        request = self._desk.request(self._desk.named(prompt))
        request.tokens_max = ANSWER_TOKENS
        answer = self._desk.machine.enter(request)
        self._desk.machine.run()
        return self._desk.machine.settled(answer)


@pytest.mark.parametrize(
    ("name", "is_exact"),
    [
        ("claude-code-session-1", True),
        ("openclaw-session-1", False),
        pytest.param("claude-code-session-1", False, marks=NIGHT),
        pytest.param("openclaw-session-1", True, marks=NIGHT),
        *(pytest.param("codex-session-1", each, marks=NIGHT) for each in (True, False)),
    ],
)
def test_a_changed_request_is_answered_as_by_a_model_that_keeps_nothing(
    name: str, is_exact: bool, tmp_path: Path
) -> None:
    rows = [exchange.row for exchange in session(name)[:5]]
    forwards = Forwards(shortened(rows, 100, tools=1), CASES[name], tmp_path, is_exact)
    found = list(mutations([exchange.row.body for exchange in forwards.session]))
    tools = [mutation for mutation in found if mutation.where[0] == "tools"]
    others = [mutation for mutation in found if mutation.where[0] != "tools"]
    tried = sampled(others, 2, seed=is_exact) + sampled(tools, 1, seed=is_exact)
    computed = [forwards.compute(mutation) for mutation in tried]
    assert max(moved for _, moved in computed) > LOGPROB_TOLERANCE, "there was nothing to notice"
    assert sum(warm.cached for warm, _ in computed) > 0, computed


# ---------------------------------------------------------------- random edits

EDITS = 60  # of one captured session
LIVE_EDITS = 50  # of a live one
# What may become of an edit but that it reaches the model; all else hides it.
REACHED = {"shown", "in the ids"}
EXPLAINED = {
    *("thinking-stripped", "cd-stripped", "number-printed", "value-coerced"),
    *("as written", "template", "refused"),
}


def judged(proof: Proof, count: int) -> int:
    """Return how many edits reach the model; fails where one is hidden."""
    tried = proof.edits(count)
    assert len({edit.kind for edit in tried}) > 30 and len(tried) == count
    found = outcomes((str(edit), proof.edited(edit)) for edit in tried)
    assert found.keys() <= {*REACHED, *EXPLAINED}
    return found["shown"] + found["in the ids"]


def test_no_random_edit_of_a_captured_session_is_hidden(name: str, proof: Proof) -> None:
    found = judged(proof, EDITS)
    least = 0.3 if CASES[name] == "harmony" else 0.8  # whose template leaves much out
    assert found > least * EDITS, found


@pytest.mark.parametrize("client_name", ["claude-code", "codex", "opencode"])
def test_no_random_edit_of_a_live_session_is_hidden(client_name: str, tmp_path: Path) -> None:
    live = Desk(FIXTURES["qwen3_5"], family("qwen3_5"), tmp_path)
    session = exchanges_of(live, CLIENTS[client_name](tools=TOOLS), SCRIPT)
    found = judged(Proof(session, "qwen3_5", tmp_path, directory=CWD), LIVE_EDITS)
    assert found > 0.7 * LIVE_EDITS, found
