"""Nothing that a client changed is hidden by a record, a canonical rule or a remembered text.

On excerpts of real sessions (tests/data/traces); scripts/mutate_traces.py tries every change of
every session, and takes ten minutes a family.
"""

import copy
import functools
import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from hearth.commands.replay.shortened_sessions import shortened
from hearth.commands.replay.traces import Captured, load_trace
from hearth.proxy.request.volatile_fields import canonical_text
from hearth.shared.wire_messages import Prompt
from hearth.worker.cache.block_hash import PrefixHash
from hearth.worker.prompt import tokenise
from hearth.worker.sessions import session_manager
from hearth.worker.sessions.echoed_turn_match import says_the_same
from hearth.worker.stream.detokenise import Vocabulary
from scripts.harness import captured_sessions
from scripts.harness.agent_worker import Desk
from scripts.harness.captured_sessions import Exchange
from scripts.harness.changes.body_mutations import WORD, Key, Mutation, leaves, mutations
from scripts.harness.changes.deliberate_edits import COMING_AND_GOING
from scripts.harness.changes.hidden_changes import EXEMPT, FIXTURES, Proof, Verdict
from scripts.harness.model_families import family
from scripts.harness.socketless_worker import Answer, Machine, loaded
from scripts.mutate_traces import sampled

TRACES = Path(__file__).parents[2] / "data" / "traces"
STRINGS = 200  # changes tried of one session
SHAPES = 80
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


def test_no_changed_string_number_or_key_is_hidden(proof: Proof) -> None:
    tried = sampled(proof.mutations(), STRINGS)
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


# ---------------------------------------------------------------- what may be left out


def only(proof: Proof, wanted: Callable[[Mutation], bool]) -> set[str]:
    found = [mutation for mutation in proof.mutations() if wanted(mutation)]
    assert found
    return set(outcomes((str(mutation), proof.mutated(mutation)) for mutation in found))


def turn_with_command(proof: Proof, begins: str) -> tuple[int, int, dict[str, Any]]:
    """Return (request, message, arguments) of a recorded call whose command begins so."""
    written = [
        call.arguments
        for parts in proof.records.values()
        for call in parts.calls
        if isinstance(call.arguments, dict)
        and str(call.arguments.get("command")).startswith(begins)
    ]
    for at in range(len(proof.session) - 1, -1, -1):
        for number, message in enumerate(proof.session[at].prompt.messages):
            for call in message.get("tool_calls") or ():
                for arguments in written:
                    if arguments["command"].endswith(
                        call["function"]["arguments"].get("command", "\0")
                    ):
                        return at, number, arguments
    raise AssertionError(f"nobody wrote {begins!r}")


def with_command(prompt: Prompt, at: int, command: str) -> Prompt:
    messages = copy.deepcopy(prompt.messages)
    messages[at]["tool_calls"][0]["function"]["arguments"]["command"] = command
    return replace(prompt, messages=messages)


def test_a_cd_to_the_sessions_directory_may_be_missing_and_no_other(
    fresh: Callable[..., Proof],
) -> None:
    proof = fresh()
    at, message, written = turn_with_command(proof, "cd /")
    sent, stripped = written["command"], written["command"].partition(" && ")[2]
    prompt = proof.session[at].prompt

    def outcome(command: str) -> str:
        return proof.judge(at, with_command(prompt, message, command), None, "").outcome

    assert outcome(sent) == "as written", "as the model wrote it: what the client took is back"
    assert outcome(f"cd /{WORD} && {stripped}") == "in the ids"
    assert outcome(f"{stripped} && cd /") == "in the ids"
    assert outcome(f"{stripped} ;") == "in the ids"


def test_only_telemetry_may_change_unseen_in_the_billing_header(
    fresh: Callable[..., Proof],
) -> None:
    proof = fresh()
    header = only(proof, lambda m: str(m.was).startswith("x-anthropic-billing-header:"))
    assert header <= {"telemetry", "shown", "in the ids"} and "telemetry" in header
    others = only(proof, lambda m: m.where[:2] == ("system", 1))
    assert others <= {"shown", "in the ids"}


# ---------------------------------------------------------------- the proof sees what is wrong


def findings(proof: Proof, wanted: Callable[[Mutation], bool], count: int = 12) -> list[str]:
    tried = sampled([mutation for mutation in proof.mutations() if wanted(mutation)], count)
    return [verdict.finding for verdict in map(proof.mutated, tried) if verdict.finding]


def test_it_sees_a_record_that_stands_for_a_turn_that_was_edited(
    fresh: Callable[..., Proof], monkeypatch: pytest.MonkeyPatch
) -> None:
    proof = fresh()
    monkeypatch.setattr(session_manager, "is_echo", lambda turn, said, known: True)
    found = findings(proof, lambda m: m.where[-1] == "command")
    assert found and all("a record hides arguments" in finding for finding in found)


def test_it_sees_thinking_that_a_record_without_any_hides(
    fresh: Callable[..., Proof], monkeypatch: pytest.MonkeyPatch
) -> None:
    proof = fresh()

    def is_echo(turn: Any, said: Any, known: Any) -> bool:
        return says_the_same(turn.said, replace(said, reasoning=""), known)

    monkeypatch.setattr(session_manager, "is_echo", is_echo)
    tried = [
        edit for edit in proof.edits(0) if edit.kind in ("thinking added", "thinking replaced")
    ]
    found = [proof.edited(edit).finding for edit in tried]
    assert any("a record hides thinking" in finding for finding in found)


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


def test_it_sees_a_tokenisation_that_is_remembered_by_less_than_its_text(
    fresh: Callable[..., Proof], monkeypatch: pytest.MonkeyPatch
) -> None:
    recall = tokenise.PieceCache.recall

    def by_its_ends(memory: Any, owner: str, key: tuple[str, bool], encode: Any) -> tuple[int, ...]:
        text, is_first = key
        return recall(memory, owner, (f"{len(text)}{text[:9]}{text[-9:]}", is_first), encode)

    monkeypatch.setattr(tokenise.PieceCache, "recall", by_its_ends)
    assert findings(fresh(), lambda m: m.kind == "letter" and len(str(m.was)) > 50)


def test_it_sees_a_plan_whose_names_do_not_tell_prompts_apart(
    fresh: Callable[..., Proof], monkeypatch: pytest.MonkeyPatch
) -> None:
    def by_length(root: PrefixHash, tokens: Any, ends: Any) -> list[PrefixHash]:
        return [PrefixHash(root + str(end).encode()) for end in ends]

    for module in ("request_builder", "predict_next_prompt"):
        monkeypatch.setattr(f"hearth.worker.requests.{module}.prefix_hashes", by_length)
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


@pytest.mark.parametrize("is_exact", [True, False])
@pytest.mark.parametrize(("name", "family_name"), list(CASES.items()))
def test_a_changed_request_is_answered_as_by_a_model_that_keeps_nothing(
    name: str, family_name: str, is_exact: bool, tmp_path: Path
) -> None:
    rows = [exchange.row for exchange in session(name)[:5]]
    forwards = Forwards(shortened(rows, 100, tools=1), family_name, tmp_path, is_exact)
    found = list(mutations([exchange.row.body for exchange in forwards.session]))
    tools = [mutation for mutation in found if mutation.where[0] == "tools"]
    others = [mutation for mutation in found if mutation.where[0] != "tools"]
    tried = sampled(others, 2, seed=is_exact) + sampled(tools, 1, seed=is_exact)
    computed = [forwards.compute(mutation) for mutation in tried]
    assert max(moved for _, moved in computed) > LOGPROB_TOLERANCE, "there was nothing to notice"
    assert sum(warm.cached for warm, _ in computed) > 0, computed


# ---------------------------------------------------------------- the changes themselves

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-99, 99) | st.text("ab1/ -\n", max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("abc", min_size=1), inner),
    max_leaves=8,
)


@st.composite
def chats(draw: st.DrawFn) -> dict[str, Any]:
    arguments = json.dumps(draw(st.dictionaries(st.text("abc", min_size=1), JSON, max_size=3)))
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    texts = draw(st.lists(st.text("ab1/ -\n", max_size=20), max_size=3))
    return {
        "model": "m",
        "messages": [
            *({"role": "user", "content": text} for text in texts),
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "content": "12:30 in /home/dev"},
        ],
        "tools": [{"type": "function", "function": {"name": "f", "parameters": draw(JSON)}}],
    }


@settings(max_examples=60)
@given(body=chats())
def test_a_mutation_changes_what_it_names_and_nothing_else(body: dict[str, Any]) -> None:
    before = dict(leaves(body))
    original = copy.deepcopy(body)
    for mutation in mutations([body]):
        changed = mutation.body_of(body)
        assert body == original
        assert before[mutation.where] == mutation.was
        after = dict(leaves(changed))
        if not isinstance(mutation.where[-1], Key):
            assert after == before | {mutation.where: mutation.now}
            assert repr(mutation.now) != repr(mutation.was)
        else:
            assert mutation.now in after.values() and changed != body


def test_ids_signatures_and_marks_are_no_leaves_but_a_tools_own_fields_are() -> None:
    schema = {"type": "object", "properties": {"id": {"type": "string"}}}
    body = {
        "system": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}],
        "messages": [
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "t", "signature": "x"},
                    {"type": "tool_use", "id": "c1", "name": "f", "input": {"id": "7"}},
                ],
            }
        ],
        "tools": [{"name": "f", "input_schema": schema, "defer_loading": True}],
    }
    found = [value for _, value in leaves(body)]
    assert found == [
        *("s", "t", "f", "id", "7", "f"),
        *("type", "object", "properties", "id", "type", "string"),
    ]
