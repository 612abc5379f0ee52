"""Checks that a session which knows earlier turns hides no change that its client has made.

Tensor-free: prompts are built and planned, nothing is computed. What stands in a prompt without
being sent must be a turn that the model wrote, and must say what the client sent there.
"""

import itertools
import json
from collections import Counter
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np

from hearth.shared.errors import RequestError
from hearth.shared.wire_messages import Prompt
from hearth.worker.cache.block_hash import pack, prefix_hashes
from hearth.worker.cache.extent_store import ExtentStore
from hearth.worker.cache.resume_planner import SlotView, make_plan
from hearth.worker.prompt.prompt_with_sampled_turns import BuiltPrompt
from hearth.worker.schedule.request_state import Request
from hearth.worker.sessions.session_visit import SessionVisit
from hearth.worker.stream.answer_parts import AnswerParts
from scripts.harness import captured_sessions
from scripts.harness.agent_worker import Desk
from scripts.harness.captured_sessions import Exchange
from scripts.harness.changes.body_mutations import SCHEMAS, Mutation, Where, mutations
from scripts.harness.changes.deliberate_edits import (
    COMING_AND_GOING,
    TRIMMED,
    UNTYPED,
    Edit,
    edits,
)
from scripts.harness.changes.echo_differences import CAPTURED_IN, differences
from scripts.harness.model_families import family
from scripts.harness.store_builders import DENSE, HYBRID, ROOT, furnish, new_line, new_store

FIXTURES: Final = {"qwen3": "qwen3", "qwen3_5": "qwen3_5", "harmony": "gpt_oss"}
HEADERS: Final = {
    "qwen3": ("<|im_start|>", "<|im_start|>assistant"),
    "qwen3_5": ("<|im_start|>", "<|im_start|>assistant"),
    "harmony": ("<|start|>", "<|start|>assistant"),
}
CLOSING_TOKENS_MAX: Final = 4  # that a template writes behind a turn
SLOTS: Final = 4

Ids = tuple[int, ...]
Run = list[Ids]  # spans, each from a header to the next


# ---------------------------------------------------------------- what may stand for what was sent

# What excuses a change that does not reach the model, and why.
EXEMPT: Final = {
    "telemetry": "the billing header that Claude Code's first system block begins with says "
    "nothing to a model",
    "not loaded": "a deferred tool is shown where it is loaded, and nobody loaded this one",
    "dropped tool": "the dialect has no such kind of tool (Codex's namespace, web_search), and "
    "counts it; a call's namespace goes with it",
    "error said": "is_error puts `Error: ` before a result that does not begin so by itself",
    "template": "the family's template leaves it out, cold as warm",
    "thinking-stripped": "an echo without thinking is the turn: clients leave it out",
    "cd-stripped": "an echo without the `cd <its directory> && ` of the turn is the turn",
    "replace_all-added": "Claude Code adds replace_all: false to Edit",
    "number-printed": "JavaScript prints 5000.0 as 5000, the same number",
    "value-coerced": "Claude Code makes a string the number that the tool declares",
    "as written": "what the client had changed of itself is as the model wrote it again",
}
THINKING: Final = frozenset(("thinking", "reasoning_content", "summary"))


# ---------------------------------------------------------------- the proof


@dataclass
class Verdict:
    """What became of one change. `finding` is empty unless it is hidden."""

    outcome: str  # "shown", "in the ids", "refused", a key of EXEMPT, or "hidden"
    finding: str = ""


@dataclass
class Seen:
    """One request as both desks build it: ids, or why they refuse it."""

    ids: Ids
    refusal: str = ""
    request: Request | None = None


@dataclass
class Held:
    """A prompt held to the cold one."""

    findings: list[str] = field(default_factory=list)
    rules: Counter[str] = field(default_factory=Counter)


class Proof:
    """Sessions primed with one captured session, beside others that know nothing of it."""

    def __init__(
        self,
        session: Sequence[Exchange],
        family_name: str,
        logs: Path,
        settings: dict[str, str] | None = None,
        directory: str = CAPTURED_IN,
    ) -> None:
        """Prime sessions with `session`, whose commands run in `directory`."""
        self.directory = directory
        self.family = family(family_name)
        self.session = session
        self.warm, self.cold = (
            Desk(FIXTURES[family_name], self.family, logs, settings=settings) for _ in range(2)
        )
        mark, self._opening = HEADERS[family_name]
        (self._header,) = self.family.tokenizer.encode(mark, add_special_tokens=False)
        self.records: dict[Ids, AnswerParts] = {}
        self.stores = [new_store(DENSE), new_store(HYBRID)]
        self.slots: list[SlotView] = []
        self.tokens: Counter[str] = Counter()  # planned, and of these reused
        for exchange in session:
            self._prime(exchange)
        for desk in (self.warm, self.cold):
            desk.prompts.explain = _nothing_lost  # type: ignore[method-assign, assignment]
        self.plain = [
            (self.seen(self.warm, exchange.prompt), self.seen(self.cold, exchange.prompt))
            for exchange in session
        ]

    def _prime(self, exchange: Exchange) -> None:
        calls_max = self.family.calls_max
        if calls_max is not None and len(exchange.parts.calls) > calls_max:
            return  # no model of this family writes such a turn
        try:
            request = captured_sessions.recite(self.warm, exchange)
        except RequestError:  # the template refuses what this client sends
            return
        visit = request.visit
        assert visit is not None
        written = tuple(request.ids[visit.header :] + request.sampled)
        assert self.records.setdefault(written, exchange.parts) == exchange.parts
        for store in self.stores:
            _keep(store, request)
        tokens = pack(request.ids + request.sampled)[:-1]  # what was sampled last has no KV
        slot = SlotView(len(self.records), tokens, tuple(request.query.cuts))
        self.slots = [slot, *self.slots][:SLOTS]

    def seen(self, desk: Desk, prompt: Prompt) -> Seen:
        try:
            request = desk.request(desk.named(prompt))
        except RequestError as error:
            return Seen((), str(error))
        return Seen(tuple(request.ids), request=request)

    # ------------------------------------------------------------ all changes

    def unchanged(self) -> Iterator[tuple[str, Verdict]]:
        """Yield what becomes of each request as it was sent."""
        for at, exchange in enumerate(self.session):
            warm, cold = self.plain[at]
            if warm.refusal or cold.refusal:
                found = [] if warm.refusal == cold.refusal else ["refused only by one"]
            else:
                held = self.hold(warm.ids, cold.ids, exchange.prompt)
                found = held.findings + self._reused(warm)
            yield f"request {at}", _hidden("; ".join(found)) if found else Verdict("as sent")

    def mutations(self) -> list[Mutation]:
        return list(mutations([exchange.row.body for exchange in self.session]))

    def edits(self, count: int, seed: int = 5) -> list[Edit]:
        """Return `count` changes (0 = all) that a person could make on purpose."""
        prompts = [exchange.prompt for exchange in self.session]
        return edits(prompts, count, seed, self.directory)

    # ------------------------------------------------------------ one change

    def mutated(self, mutation: Mutation) -> Verdict:
        """Return what becomes of a change of a raw body."""
        exchange = self.session[mutation.request]
        body = mutation.body_of(exchange.row.body)
        try:
            prompt = captured_sessions.prompt_of(exchange.row, body)
        except RequestError:
            return Verdict("refused")
        reason = _reason(exchange.row.body, mutation, self.family.name)
        text = mutation.now if isinstance(mutation.now, str) else None
        return self.judge(mutation.request, prompt, text, reason)

    def edited(self, edit: Edit) -> Verdict:
        """Return what becomes of an edit; it may be hidden by the rule that its client has for it.

        By no other, and only where the client itself makes this very change.
        """
        reason = "template" if self._leaves_out(edit) else ""
        return self.judge(edit.request, edit.prompt, edit.text, reason, {edit.rule})

    def _leaves_out(self, edit: Edit) -> bool:
        """Whether the family's template may leave out an edit of this kind, cold as warm."""
        thoughts = [each.get("reasoning_content") for each in edit.prompt.messages]
        is_thinking = edit.kind.startswith("thinking") or edit.text in thoughts
        by_family = {
            "harmony": edit.kind not in COMING_AND_GOING,
            "qwen3": is_thinking,
            "qwen3_5": edit.kind in UNTYPED,
        }
        return edit.kind in TRIMMED or by_family[self.family.name]

    def judge(
        self,
        at: int,
        prompt: Prompt,
        text: str | None,
        reason: str,
        rules: Set[str] = EXEMPT.keys(),
    ) -> Verdict:
        """Return what becomes of `prompt`, request `at` with a change; `text` is what it now says.

        `reason` is why it need not reach the model, "" where it must; `rules` are those that may
        explain that a record stands for what was changed.
        """
        warm, cold = self.seen(self.warm, prompt), self.seen(self.cold, prompt)
        before_warm, before_cold = self.plain[at]
        if warm.refusal or cold.refusal:
            same = warm.refusal == cold.refusal
            return Verdict("refused") if same else _hidden("refused only by one")
        held = self.hold(warm.ids, cold.ids, prompt)
        if findings := held.findings + self._reused(warm):
            return _hidden("; ".join(findings))
        if cold.ids == before_cold.ids:
            return Verdict(reason) if reason else _hidden("no prompt shows it")
        is_same = warm.ids == before_warm.ids
        if text is not None and not is_same and self._shows(text, warm.ids, before_warm.ids):
            return Verdict("shown")
        if not is_same and (text is None or not self._shows(text, cold.ids, before_cold.ids)):
            return Verdict("in the ids")
        before = self.hold(before_warm.ids, before_cold.ids, self.session[at].prompt)
        if new := held.rules - before.rules:
            return Verdict(min(new)) if rules >= set(new) else _hidden(f"{min(new)} hides it")
        is_undone = bool(before.rules - held.rules)
        return Verdict("as written") if is_undone else _hidden("only the cold prompt shows it")

    def _shows(self, text: str, ids: Ids, before: Ids) -> bool:
        """Whether what is new in a prompt holds `text`, as it is or as JSON in a string."""
        known = set(self._spans(before))
        shown = "\n".join(self._text(span) for span in self._spans(ids) if span not in known)
        for _ in range(3):
            if text.strip() in shown:
                return True
            text = json.dumps(text.strip(), ensure_ascii=False)[1:-1]
        return False

    def _reused(self, seen: Seen) -> list[str]:
        """Return what is wrong with the KV that a prompt would be answered from."""
        assert seen.request is not None
        query, found = seen.request.query, []
        for store, slots in itertools.product(self.stores, ([], self.slots)):
            plan = make_plan(store, slots, query, is_exact=False)
            slot = next((slot for slot in slots if slot.number == plan.slot), None)
            parts = [extent.tokens for extent in plan.path]
            if slot is not None and not parts:
                parts = [slot.tokens]
            reused = np.concatenate([pack([]), *parts])[: plan.position]
            self.tokens["planned"] += len(query.tokens)
            self.tokens["reused"] += plan.position
            if not np.array_equal(reused, query.tokens[: plan.position]):
                found.append("the plan reuses KV of other tokens")
        return found

    # ------------------------------------------------------------ one prompt against another

    def hold(self, warm: Ids, cold: Ids, prompt: Prompt) -> Held:
        """Compare a prompt with the cold one, message by message.

        What the model did not write must be equal. An assistant's turn must be equal too, or be
        the tokens of a recorded turn that says what `prompt` has there.
        """
        held = Held()
        ours, theirs = self._runs(warm), self._runs(cold)
        if [kind for kind, _ in ours] != [kind for kind, _ in theirs]:
            return Held(["the messages stand in another order"])
        groups = iter(_assistant_groups(prompt.messages, self.family.capabilities.splits_calls))
        for (is_assistant, mine), (_, other) in zip(ours, theirs, strict=True):
            group = next(groups, []) if is_assistant else []
            if mine == other:
                continue
            if not is_assistant:
                pairs = itertools.zip_longest(mine, other, fillvalue=())
                new, sent = next(pair for pair in pairs if pair[0] != pair[1])
                told = f"{self._text(new)[:200]!r} instead of {self._text(sent)[:200]!r}"
                held.findings.append(f"not what was sent: {told}")
                continue
            for span, rendered, message in self._paired(mine, other, group):
                self._hold_turn(span, rendered, message, prompt, held)
        return held

    def _paired(
        self, mine: Run, other: Run, group: list[dict[str, Any]]
    ) -> Iterator[tuple[Ids, Ids, dict[str, Any]]]:
        """Yield (span, the cold one, message) for each turn of a run.

        A sampled turn may have more spans than a rendered one: harmony writes one a channel.
        """
        if len(group) == 1 or len(other) != len(group):
            yield _joined(mine), _joined(other), group[0] if group else _NOTHING
            return
        at = 0
        for rendered, message in zip(other, group, strict=True):
            ends = range(at + 1, len(mine) + 1)
            spans = (_joined(mine[at:end]) for end in ends)
            fits = (n for n, span in enumerate(spans, 1) if self._stands_for(span, rendered))
            count = next(fits, 1)
            yield _joined(mine[at : at + count]), rendered, message
            at += count
        if at < len(mine):
            yield _joined(mine[at:]), (), _NOTHING

    def _stands_for(self, span: Ids, rendered: Ids) -> bool:
        return span == rendered or self._recorded(span, rendered) is not None

    def _hold_turn(
        self, span: Ids, rendered: Ids, message: dict[str, Any], prompt: Prompt, held: Held
    ) -> None:
        if span == rendered:
            return
        record = self._recorded(span, rendered)
        if record is None:
            held.findings.append(f"neither sampled nor sent: {self._text(span)[:200]!r}")
            return
        hidden, rules = differences(record, message, prompt, self.directory)
        held.rules.update(rules)
        if hidden:
            held.findings.append(f"a record hides {', '.join(hidden)}: {self._text(span)[:200]!r}")

    def _recorded(self, span: Ids, rendered: Ids) -> AnswerParts | None:
        """Return what the model said where `span` is what it wrote, and the turn's end."""
        for end in range(len(span), len(span) - CLOSING_TOKENS_MAX, -1):
            tail = span[end:]
            if span[:end] in self.records and rendered[len(rendered) - len(tail) :] == tail:
                return self.records[span[:end]]
        return None

    def _runs(self, ids: Ids) -> list[tuple[bool, Run]]:
        """Return runs of spans, those of the assistant apart from others."""
        groups = itertools.groupby(self._spans(ids), self._is_assistants)
        return [(is_assistant, list(spans)) for is_assistant, spans in groups]

    def _spans(self, ids: Ids) -> list[Ids]:
        starts = np.flatnonzero(pack(ids) == self._header).tolist()
        return [ids[a:b] for a, b in itertools.pairwise([0, *starts, len(ids)]) if a < b]

    def _is_assistants(self, span: Ids) -> bool:
        return self._text(span[:8]).startswith(self._opening)

    def _text(self, ids: Ids) -> str:
        text: str = self.family.tokenizer.decode(list(ids))
        return text


def _keep(store: ExtentStore, request: Request) -> None:
    """Keep a prompt as its prefill would, and behind it what was sampled."""
    tokens, query = pack(request.ids + request.sampled), request.query
    end = len(tokens) - 1
    joint, line = store.root, new_line()
    said = prefix_hashes(ROOT, tokens, [end])
    for position, name in zip([*query.cuts, end], [*query.names, *said], strict=True):
        if position > joint.position:
            run = tokens[joint.position : position]
            joint, extent = store.commit(joint, name, run, position < end, line)
            if extent is not None:
                furnish(store, extent)


def _nothing_lost(visit: SessionVisit, built: BuiltPrompt, pictures: Any, owner: str) -> None:
    """Stand in for the divergence report, which takes half of a prompt's time."""


def _hidden(finding: str) -> Verdict:
    return Verdict("hidden", finding)


def _assistant_groups(messages: list[dict[str, Any]], splits: bool) -> list[list[dict[str, Any]]]:
    """Return the messages of each run of the assistant's; `splits`: results part one's calls."""
    shown: list[dict[str, Any]] = []
    waiting = [*reversed(messages)]
    while waiting:
        shown.append(message := waiting.pop())
        first, *others = (message.get("tool_calls") if splits else ()) or (None,)
        results = []
        while others and waiting and waiting[-1]["role"] == "tool":
            results.append(waiting.pop())
        for call in (first, *others) if others else ():
            if shown[-1]["role"] == "tool":
                shown.append({"role": "assistant", "content": ""})
            before = [] if call is first else shown[-1].get("tool_calls", [])
            shown[-1] = {**shown[-1], "tool_calls": [*before, call]}
            shown += [each for each in results if each.get("tool_call_id") == call.get("id")]
            results = [each for each in results if each not in shown[-len(results) - 1 :]]
        shown += results
    groups = itertools.groupby(shown, lambda message: message["role"] == "assistant")
    return [list(group) for is_assistant, group in groups if is_assistant]


_NOTHING: Final[dict[str, Any]] = {"role": "assistant", "content": ""}


def _joined(run: Run) -> Ids:
    return tuple(itertools.chain.from_iterable(run))


def _reason(body: dict[str, Any], mutation: Mutation, family_name: str) -> str:
    """Return why a change need not reach the model; "" where it must."""
    where = mutation.where
    if where[0] == "system" and str(mutation.was).startswith("x-anthropic-billing-header:"):
        return "telemetry"
    if where[0] == "tools":
        tool = body["tools"][where[1]]
        if tool.get("defer_loading"):
            return "not loaded"
        if tool.get("type") not in (None, "function", "custom"):
            return "dropped tool"
    if where[-1] == "namespace":
        return "dropped tool"
    if where[-1] == "is_error":
        return "error said"
    return "template" if _is_left_out(family_name, body, where) else ""


def _is_left_out(family_name: str, body: dict[str, Any], where: Where) -> bool:
    """Whether a template may leave out what stands there.

    Qwen3's leaves out the thinking of turns that are over; harmony's that too, what was said beside
    calls once an answer came, calls behind a message's first, and much of a tool's schema.
    """
    if family_name == "harmony":
        return _is_assistants(body, where) or not SCHEMAS.isdisjoint(where)
    return family_name == "qwen3" and not THINKING.isdisjoint(where)


def _is_assistants(body: dict[str, Any], where: Where) -> bool:
    """Whether it stands in what the model said."""
    if where[0] not in ("messages", "input"):
        return False
    item = body[where[0]][where[1]]
    return item.get("role") == "assistant" or item.get("type") in ("function_call", "reasoning")
