"""Runs a worker's prompt side and its model without sockets, for tests that play agents.

What the model writes is scripted at token level: each answer is given in parts, its family writes
them as text, and the sampler gives that text's tokens one by one. Everything else is real.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import mlx.core as mx

from hearth.commands.replay.ideal_cache import ideal_cached
from hearth.proxy.request.message_digests import MessageDigester
from hearth.shared.settings import Settings, load_settings
from hearth.shared.wire_messages import Prompt, Sampling, Speaker, Submit, Usage
from hearth.worker.cache.image_keys import PromptImage
from hearth.worker.engine.decode.sampler import SamplingParams
from hearth.worker.engine.model_loader import LoadedModel
from hearth.worker.prompt.template_turn_tokens import turn_marks
from hearth.worker.schedule.request_ending import TurnRecorder
from hearth.worker.schedule.request_state import RenderNextPrompt, Request
from hearth.worker.sessions.turn_store import lookup_by_link
from hearth.worker.setup.prompt_and_session_setup import make_builder, make_sessions
from hearth.worker.stream.answer_parts import AnswerParts, ToolCall
from hearth.worker.stream.detokenise import Vocabulary
from hearth.worker.threads.request_builder import (
    PromptFacts,
    RecentPrompts,
    RequestBuilder,
    SessionPromptBuilder,
    predict_next_prompt,
)
from scripts.fixtures.fixture_cache import TINY_NAMES
from scripts.harness.constrained_answers import constrainer_for
from scripts.harness.model_families import Family
from scripts.harness.socketless_worker import Answer, Machine, loaded
from scripts.harness.store_builders import ROOT
from scripts.harness.zero_model import ZeroModel

CONTEXT_TOKENS = 200_000


@dataclass(frozen=True)
class Reply:
    """What came of one request."""

    answer: Answer
    given: AnswerParts
    call_ids: tuple[str, ...]
    signature: str
    ids: list[int]  # the prompt
    sampled: list[int]
    cached: int
    prefilled: int
    divergence: dict[str, Any] | None
    states: dict[int, str]  # how each assistant message was rendered


def given(request: Request) -> AnswerParts:
    """Return what the client was given: what the server makes of what the model wrote."""
    assert request.session_context is not None and request.session_context.answer is not None
    said = request.session_context.answer
    calls = tuple(ToolCall(name, arguments) for name, arguments in said.calls)
    return AnswerParts(said.reasoning, said.content, calls)


class ScriptedMachine(Machine):
    """A machine whose model says what it is told to."""

    scripts: dict[str, list[int]]
    is_scripted = True  # False: from then on the model says what it would

    def choose(self, request: Request) -> SamplingParams:
        if not self.is_scripted:
            return super().choose(request)
        script = self.scripts[request.request_id]

        def sample(_logprobs: mx.array, places: Sequence[int]) -> mx.array:
            return mx.array([script[min(place, len(script) - 1)] for place in places])

        return SamplingParams(sampler=sample, processors=(), top_logprobs=None)


@dataclass
class Ids:
    """Gives the ids that a test wants, then counts."""

    wanted: list[str] = field(default_factory=list)
    numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def __call__(self) -> str:
        return self.wanted.pop(0) if self.wanted else f"given{next(self.numbers):05d}"


class Desk:
    """One worker: `fixture`'s weights behind a family's tokenizer and template."""

    def __init__(
        self,
        fixture: str,
        family: Family,
        log_root: Path,
        chunk: int = 256,
        settings: dict[str, str] | None = None,
        model: LoadedModel | None = None,
        **machine: Any,
    ) -> None:
        """`model` stands in the place of the fixture's."""
        self.family = family
        self.foreseen: list[RenderNextPrompt] = []  # what the prompt thread would render next
        self.settings: Settings = load_settings(
            {"LOG_ROOT": str(log_root), "PROXY_API_KEY": "k", "DEFAULT_THINKING": "true"}
            | (settings or {}),
            None,
        )
        tokenizer, grammars = family.tokenizer, constrainer_for(family)
        self.marks = turn_marks(tokenizer)
        self.sessions = make_sessions(self.settings, chunk, machine.get("is_exact", False))
        self.ids = self.sessions.new_id = Ids()
        vocabulary = Vocabulary(tokenizer)
        self.machine = ScriptedMachine(
            model or loaded(fixture, tiny=fixture in TINY_NAMES),
            self.marks,
            vocabulary,
            chunk=chunk,
            end_ids=grammars.end_ids,
            ended=TurnRecorder(
                self.sessions, lambda: self.machine.keeper.evictions, self.foreseen.append
            ).ended,
            **machine,
        )
        if isinstance(self.machine.loaded.model, ZeroModel):
            self.machine.engine.verifies_drafts = True  # of logits that are all 0 no trial tells
        self.machine.scripts = {}
        self.facts = PromptFacts(
            CONTEXT_TOKENS,
            len(tokenizer.get_vocab()),
            ROOT,
            family.reader,
            grammars,
            vocabulary,
            self.machine.rule,
            adapters=self.machine.engine.adapters.identities,
        )
        self.adapter = ""  # that requests name from now on
        self.prompts = SessionPromptBuilder(
            make_builder(tokenizer, self.marks, grammars.end_ids, CONTEXT_TOKENS, self.settings),
            self.sessions,
            self.facts,
        )
        self.builder = RequestBuilder(
            self.prompts, RecentPrompts(False), self.settings.default_max_tokens
        )
        self.digester = MessageDigester(
            self.settings.cache_canonicalize_tool_context, self.settings.cache_norm_safety_check
        )
        self.pictures: dict[str, PromptImage] = {}  # that messages show, by digest

    def named(self, prompt: Prompt, speaker: Speaker | None = None) -> Prompt:
        """Return the prompt as the proxy sends it."""
        speaker = speaker or prompt.speaker
        names, delta = self.digester.names(prompt.messages, speaker.key)
        return replace(prompt, names=names, delta_chars=delta, speaker=speaker)

    def request(self, prompt: Prompt, stop: Sequence[str] = ()) -> Request:
        """Return the request as the prompt thread makes it."""
        lease, sampling = self.machine.new_lease(), Sampling(max_tokens=100_000, stop=list(stop))
        message = Submit(lease.request_id, prompt, sampling, adapter=self.adapter)
        return self.builder.build(lease, message, self.pictures)

    def submit(self, prompt: Prompt, parts: AnswerParts, stop: Sequence[str] = ()) -> Answer:
        """Hand a named prompt in; the model will answer `parts`."""
        request = self.request(prompt, stop)
        end = self.family.tokenizer.encode(self.family.end_of(parts), add_special_tokens=False)
        self.machine.scripts[request.request_id] = self.script(request, parts) + end
        return self.machine.enter(request)

    def script(self, request: Request, parts: AnswerParts) -> list[int]:
        """Return the tokens that say `parts`, without the one that ends the turn."""
        text = self.family.written(parts)
        if request.session_context is not None and not parts.reasoning:
            opening = self.family.tokenizer.decode(request.ids[request.session_context.header :])
            if not self.family.reader.is_thinking_open(opening):
                text = text.removeprefix("\n</think>\n\n")  # there is none that could be closed
        return list(self.family.tokenizer.encode(text, add_special_tokens=False))

    def pretend(self, request: Request, parts: AnswerParts) -> None:
        """Tell the sessions that `request` was answered `parts`, without a forward."""
        request.sampled = self.script(request, parts)
        for token_id in request.sampled:
            request.output.add(token_id, None)
        request.output.finish(is_complete=True)
        request.deltas.call_ids = [request.deltas.new_id() for _ in request.output.parts.calls]
        usage = Usage(len(request.ids), len(request.ids), 0, len(request.sampled))
        TurnRecorder(self.sessions, evictions=None, render_next=lambda _: None).ended(
            request, usage, "stop", None
        )

    def finish(self, answers: Iterable[Answer]) -> list[Reply]:
        """Compute until all is answered."""
        self.machine.run()
        return list(map(self._reply, answers))

    def _reply(self, answer: Answer) -> Reply:
        request = answer.request
        visit = request.session_context
        assert visit is not None and answer.usage is not None
        place = lookup_by_link(visit.prompt.speaker.key, visit.line_match.links[-1])
        own = request.ids[visit.header :] + request.sampled
        turn = next(turn for turn in self.sessions.turns.find([place]) if turn.ids.tolist() == own)
        return Reply(
            answer,
            given(request),
            turn.call_ids,
            turn.signature,
            request.ids,
            request.sampled,
            answer.cached,
            answer.prefilled,
            answer.usage.divergence,
            visit.states,
        )

    def ask(self, prompt: Prompt, parts: AnswerParts) -> Reply:
        """Have one prompt answered with `parts`."""
        return self.finish([self.submit(prompt, parts)])[0]

    def idle(self) -> None:
        """The client is busy with its tools: do all that idle time is for."""
        for job in self.foreseen:
            if (query := predict_next_prompt(job.request, self.prompts)) is not None:
                self.machine.scheduler.prefill_later(query)
        self.foreseen.clear()
        self.machine.work_ahead()

    def forget(self) -> None:
        """Empty the KV cache; what is known of sessions stays."""
        self.machine.scheduler.forget()


def ideals(replies: Sequence[Any]) -> list[int]:
    """Return for each request (its prompt's `ids`, and what was `sampled`), in order, what a cache
    without limits had to prefill.

    Such a cache keeps every prompt with its answer; a token that was sampled last has no KV.
    """
    kept = [ids for reply in replies for ids in (reply.ids, [*reply.ids, *reply.sampled])]
    cached = ideal_cached(kept)[::2]
    return [len(reply.ids) - (known or 0) for reply, known in zip(replies, cached, strict=True)]
