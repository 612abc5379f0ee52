"""Checks that a session which knows earlier turns hides no change that its client has made.

Tensor-free: prompts are built and planned, nothing is computed. What stands in a prompt without
being sent must be a turn that the model wrote, and must say what the client sent there.
"""

import itertools
import json
from collections import Counter
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from hearth.shared.errors import RequestError
from hearth.shared.wire_messages import Prompt
from hearth.worker.cache.block_hash import common_length, pack, prefix_hashes
from hearth.worker.cache.prefix_search import SlotView, make_plan
from hearth.worker.schedule.request_state import Request
from hearth.worker.stream.answer_parts import AnswerParts
from scripts.harness import captured_sessions
from scripts.harness.agent_worker import Desk
from scripts.harness.changes.body_mutations import SCHEMAS, Mutation, mutations
from scripts.harness.changes.deliberate_edits import COMING_AND_GOING, TRIMMED, UNTYPED, Edit, edits
from scripts.harness.changes.echo_differences import CAPTURED_IN, differences
from scripts.harness.model_families import family
from scripts.harness.store_builders import DENSE, HYBRID, ROOT, furnish, new_line, new_store

FIXTURES: Final = {"qwen3": "qwen3", "qwen3_5": "qwen3_5", "harmony": "gpt_oss"}
HEADERS: Final = {"qwen3": "<|im_start|>", "qwen3_5": "<|im_start|>", "harmony": "<|start|>"}
CLOSING_TOKENS_MAX: Final = 4  # that a template writes behind a turn
SLOTS: Final = 4
TOLD_TOKENS_MAX: Final = 60  # of what is told of a turn

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


class Proof:
    """Sessions primed with one captured session, beside others that know nothing of it."""

    def __init__(
        self,
        session: Sequence[captured_sessions.Exchange],
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
        mark = HEADERS[family_name]
        self._opening = f"{mark}assistant"
        (self._header,) = self.family.tokenizer.encode(mark, add_special_tokens=False)
        self.records: dict[Ids, AnswerParts] = {}
        self.stores = [new_store(DENSE), new_store(HYBRID)]
        self.slots: list[SlotView] = []
        self.tokens: Counter[str] = Counter()  # planned, and of these reused
        for exchange in session:
            self._prime(exchange)
        for desk in (self.warm, self.cold):
            # The report of a divergence takes half of a prompt's time.
            desk.prompts.explain = lambda *_: None  # type: ignore[method-assign]
        self.plain = [
            (self.seen(self.warm, exchange.prompt), self.seen(self.cold, exchange.prompt))
            for exchange in session
        ]

    def _prime(self, exchange: captured_sessions.Exchange) -> None:
        if self.family.calls_max and len(exchange.parts.calls) > self.family.calls_max:
            return  # no model of this family writes such a turn
        try:
            request = captured_sessions.recite(self.warm, exchange)
        except RequestError:  # the template refuses what this client sends
            return
        assert request.session_context is not None
        written = tuple(request.ids[request.session_context.header :] + request.sampled)
        assert self.records.setdefault(written, exchange.parts) == exchange.parts
        tokens, query = pack(request.ids + request.sampled), request.query
        end = len(tokens) - 1  # what was sampled last has no KV
        names = [*query.names, *prefix_hashes(ROOT, tokens, [end])]
        for store in self.stores:  # a prompt as its prefill would, and behind it what was sampled
            node, line = store.root, new_line()
            for position, name in zip([*query.cuts, end], names, strict=True):
                if position == node.position:
                    continue  # nothing was sampled
                run = tokens[node.position : position]
                node, extent = store.commit(node, name, run, position < end, line)
                if extent is not None:
                    furnish(store, extent)
        slot = SlotView(len(self.records), tokens[:end], tuple(query.cuts))
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
            findings, _ = self.held(*self.plain[at], exchange.prompt)
            yield f"request {at}", _hidden(*findings) if findings else Verdict("as sent")

    def mutations(self) -> list[Mutation]:
        return list(mutations([exchange.row.body for exchange in self.session]))

    def edits(self, count: int, seed: int = 5) -> list[Edit]:
        """Return `count` changes (0 = all) that a person could make on purpose."""
        return edits([each.prompt for each in self.session], count, seed, self.directory)

    # ------------------------------------------------------------ one change

    def mutated(self, mutation: Mutation) -> Verdict:
        """Return what becomes of a change of a raw body."""
        exchange = self.session[mutation.request]
        try:
            prompt = captured_sessions.prompt_of(exchange.row, mutation.body_of(exchange.row.body))
        except RequestError:
            return Verdict("refused")
        return self.judge(
            mutation.request,
            prompt,
            mutation.now if isinstance(mutation.now, str) else None,
            _excuse(exchange.row.body, mutation, self.family.name),
        )

    def edited(self, edit: Edit) -> Verdict:
        """Return what becomes of an edit; it may be hidden by the rule that its client has for it.

        By no other, and only where the client itself makes this very change.
        """
        left_out = {  # by the family's template, cold as warm
            "harmony": edit.kind not in COMING_AND_GOING,
            "qwen3": edit.kind.startswith("thinking")
            or edit.text in [each.get("reasoning_content") for each in edit.prompt.messages],
            "qwen3_5": edit.kind in UNTYPED,
        }
        reason = "template" if edit.kind in TRIMMED or left_out[self.family.name] else ""
        return self.judge(edit.request, edit.prompt, edit.text, reason, {edit.rule})

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
        findings, taken = self.held(warm, cold, prompt)
        if findings:
            return _hidden(*findings)
        if warm.refusal:
            return Verdict("refused")
        if cold.ids == before_cold.ids:
            return Verdict(reason) if reason else _hidden("no prompt shows it")
        if warm.ids != before_warm.ids:
            if text is not None and self._shows(text, warm.ids, before_warm.ids):
                return Verdict("shown")
            if text is None or not self._shows(text, cold.ids, before_cold.ids):
                return Verdict("in the ids")
        _, taken_before = self.held(before_warm, before_cold, self.session[at].prompt)
        if new := taken - taken_before:
            return Verdict(min(new)) if rules >= set(new) else _hidden(f"{min(new)} hides it")
        if taken_before - taken:
            return Verdict("as written")
        return _hidden("only the cold prompt shows it")

    def _shows(self, text: str, ids: Ids, before: Ids) -> bool:
        """Whether what is new in a prompt holds `text`, as it is or as JSON in a string."""
        known = set(self._spans(before))
        shown = "\n".join(self._text(span) for span in self._spans(ids) if span not in known)
        forms = itertools.accumulate(
            range(2),
            lambda form, _: json.dumps(form, ensure_ascii=False)[1:-1],
            initial=text.strip(),
        )
        return any(form.strip() in shown for form in forms)

    def _reused(self, seen: Seen) -> Iterator[str]:
        """Yield what is wrong with the KV that a prompt would be answered from."""
        assert seen.request is not None
        query = seen.request.query
        for store, slots in itertools.product(self.stores, ([], self.slots)):
            plan = make_plan(store, slots, query, is_exact=False)
            parts = [extent.tokens for extent in plan.path] or [
                slot.tokens for slot in slots if slot.number == plan.slot
            ]
            reused = np.concatenate([pack([]), *parts])[: plan.position]
            self.tokens.update(planned=len(query.tokens), reused=plan.position)
            if not np.array_equal(reused, query.tokens[: plan.position]):
                yield "the plan reuses KV of other tokens"

    # ------------------------------------------------------------ one prompt against another

    def held(self, warm: Seen, cold: Seen, prompt: Prompt) -> tuple[list[str], Counter[str]]:
        """Compare a prompt with the cold one; return what is wrong, and how often each rule holds.

        Message by message. What the model did not write must be equal. An assistant's turn must be
        equal too, or be the tokens of a recorded turn that says what `prompt` has there.
        """
        rules = Counter[str]()
        if warm.refusal or cold.refusal:
            return ["refused only by one"] if warm.refusal != cold.refusal else [], rules
        ours, theirs = self._runs(warm.ids), self._runs(cold.ids)
        if [kind for kind, _ in ours] != [kind for kind, _ in theirs]:
            return ["the messages stand in another order"], rules
        findings = [*self._reused(warm)]
        groups = iter(_assistant_groups(prompt.messages, self.family.capabilities.splits_calls))
        for (is_assistant, mine), (_, other) in zip(ours, theirs, strict=True):
            group = next(groups, []) if is_assistant else []
            for span, rendered, message in self._paired(mine, other, group):
                if span == rendered:
                    continue
                at = common_length(pack(span), pack(rendered))
                new, sent = (self._text(ids[at:][:TOLD_TOKENS_MAX]) for ids in (span, rendered))
                record = self._recorded(span, rendered) if is_assistant else None
                if record is None:
                    findings.append(f"neither sampled nor sent: {new!r} instead of {sent!r}")
                    continue
                hidden, taken = differences(record, message, prompt, self.directory)
                rules.update(taken)
                findings += [f"a record hides {what}: {new!r}" for what in hidden]
        return findings, rules

    def _paired(
        self, mine: Run, other: Run, group: list[dict[str, Any]]
    ) -> Iterator[tuple[Ids, Ids, dict[str, Any]]]:
        """Yield (span, the cold one, message) for each turn of a run.

        A sampled turn may have more spans than a rendered one: harmony writes one a channel.
        """
        if len(other) != len(group):
            other, group = [tuple(itertools.chain(*other))], group[:1] or [_NOTHING]
        for rendered, message in zip(other[:-1], group, strict=False):
            fits = (
                count
                for count, span in enumerate(itertools.accumulate(mine), 1)
                if span == rendered or self._recorded(span, rendered) is not None
            )
            count = next(fits, 1)
            yield tuple(itertools.chain(*mine[:count])), rendered, message
            mine = mine[count:]
        yield tuple(itertools.chain(*mine)), other[-1], group[-1]

    def _recorded(self, span: Ids, rendered: Ids) -> AnswerParts | None:
        """Return what the model said where `span` is what it wrote, and the turn's end."""
        fits = (
            self.records[span[:end]]
            for end in range(len(span), len(span) - CLOSING_TOKENS_MAX, -1)
            if span[:end] in self.records
            and span[end:] == rendered[len(rendered) - len(span[end:]) :]
        )
        return next(fits, None)

    def _runs(self, ids: Ids) -> list[tuple[bool, Run]]:
        """Return runs of spans, those of the assistant apart from others."""
        return [
            (is_assistant, list(spans))
            for is_assistant, spans in itertools.groupby(
                self._spans(ids), lambda span: self._text(span[:8]).startswith(self._opening)
            )
        ]

    def _spans(self, ids: Ids) -> list[Ids]:
        starts = np.flatnonzero(pack(ids) == self._header).tolist()
        return [ids[a:b] for a, b in itertools.pairwise([0, *starts, len(ids)]) if a < b]

    def _text(self, ids: Ids) -> str:
        return str(self.family.tokenizer.decode(list(ids)))


def _hidden(*findings: str) -> Verdict:
    return Verdict("hidden", "; ".join(findings))


def _assistant_groups(messages: list[dict[str, Any]], splits: bool) -> list[list[dict[str, Any]]]:
    """Return the messages of each run of the assistant's; `splits`: results part one's calls."""
    shown: list[dict[str, Any]] = []
    waiting = [*reversed(messages)]
    while waiting:
        message, results = waiting.pop(), []
        calls = (message.get("tool_calls") if splits else ()) or ()
        if len(calls) < 2:
            shown.append(message)
            continue
        while waiting and waiting[-1]["role"] == "tool":
            results.append(waiting.pop())
        for call in calls:
            shown.append(message | {"tool_calls": [call]})
            shown += [each for each in results if each.get("tool_call_id") == call.get("id")]
            results = [each for each in results if each not in shown]
            message = _NOTHING
        shown += results
    return [
        list(group)
        for role, group in itertools.groupby(shown, lambda message: message["role"])
        if role == "assistant"
    ]


_NOTHING: Final[dict[str, Any]] = {"role": "assistant", "content": ""}


def _excuse(body: dict[str, Any], mutation: Mutation, family_name: str) -> str:
    """Return why a change need not reach the model; "" where it must.

    Qwen3's template leaves out the thinking of turns that are over; harmony's that too, what was
    said beside calls once an answer came, calls behind a message's first, and much of a schema.
    """
    root, last = str(mutation.where[0]), mutation.where[-1]
    is_tool = root == "tools"
    is_item = root in ("tools", "messages", "input") and len(mutation.where) > 1
    item = body[root][mutation.where[1]] if is_item else {}
    is_said = item.get("role") == "assistant" or item.get("type") in ("function_call", "reasoning")
    left_out = {
        "harmony": is_said or not SCHEMAS.isdisjoint(mutation.where),
        "qwen3": not THINKING.isdisjoint(mutation.where),
    }
    excuses = {
        "telemetry": root == "system"
        and str(mutation.was).startswith("x-anthropic-billing-header:"),
        "not loaded": is_tool and item.get("defer_loading"),
        "dropped tool": last == "namespace"
        or (is_tool and item.get("type") not in (None, "function", "custom")),
        "error said": last == "is_error",
        "template": left_out.get(family_name),
    }
    return next((reason for reason, holds in excuses.items() if holds), "")
