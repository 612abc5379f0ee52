"""Turns a Submit into a Request with the prompt's tokens, cuts, constraints and parser.

A prompt is rendered with the session's sampled turns, loaded tools and thinking.
The next prompt, which idle time can prefill, is rendered the same way.
"""

import dataclasses
import itertools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Final

from hearth.shared.errors import RequestError
from hearth.shared.our_ids import SIGNATURE_BEGIN
from hearth.shared.wire_messages import Constraints, Prompt, Submit, TokenQuery
from hearth.worker.cache.block_hash import (
    PrefixHash,
    adapter_root,
    common_length,
    key_root,
    prefix_hashes,
)
from hearth.worker.cache.conversation_priority import Conversation
from hearth.worker.cache.image_keys import PromptImages, keys_of
from hearth.worker.cache.prefix_search import PrefixQuery
from hearth.worker.constraint.call_drafts import CallDrafts
from hearth.worker.constraint.grammar_compiler import GrammarCompiler
from hearth.worker.constraint.token_mask import TokenMask
from hearth.worker.draft.answer_drafter import PREDICTION_TOKENS_MAX, AnswerSources
from hearth.worker.engine.decode.sampler import check
from hearth.worker.formats.shared.output_format import OutputFormat
from hearth.worker.prompt.awaited_work import ClientLeft
from hearth.worker.prompt.prefill_cuts import CutRule
from hearth.worker.prompt.prompt_with_sampled_turns import BuiltPrompt, PromptBuilder, PromptContent
from hearth.worker.prompt.render_messages import with_loaded_tools, without_images
from hearth.worker.prompt.template_capabilities import ThinkingSwitches
from hearth.worker.schedule.answer_drafts import DraftPolicy
from hearth.worker.schedule.client_lease import ClientLease
from hearth.worker.schedule.request_state import AnswerDeltas, PrefillOnly, Request, Suspicion
from hearth.worker.schedule.suspects import Suspects
from hearth.worker.sessions.echoed_turn_match import TurnContent
from hearth.worker.sessions.find_divergence import explain
from hearth.worker.sessions.session_context import SessionContext
from hearth.worker.sessions.session_manager import SessionManager
from hearth.worker.sessions.turn_store import Turn
from hearth.worker.stream.answer_parts import AnswerSplitter
from hearth.worker.stream.detokenise import Vocabulary
from hearth.worker.stream.output_processor import OutputProcessor

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PromptFacts:
    """Holds the parts of the model that are needed to build a request. Immutable."""

    context_tokens: int
    vocab_size: int
    root: PrefixHash  # hash of the empty prefix
    output_format: OutputFormat  # parses the model's output
    grammar_compiler: GrammarCompiler  # makes the masks for constrained answers
    vocabulary: Vocabulary
    cut_rule: CutRule  # gives the cuts of prefills
    model_name: str = ""
    drafts: DraftPolicy = field(default_factory=DraftPolicy)
    thinking: ThinkingSwitches = field(default_factory=ThinkingSwitches)
    adapters: Mapping[str, str] = field(default_factory=dict)  # name -> identity of the files


_IMAGE: Final = "[image]"


def is_raw(prompt: Prompt) -> bool:
    """Return whether the prompt goes to the model without a template."""
    return prompt.text is not None or bool(prompt.ids)


class SessionPromptBuilder:
    """Builds prompts from messages and from the state of their sessions. Any prompt thread.

    Invariant: later prompts contain a remembered turn with exactly the sampled tokens.
    """

    def __init__(
        self, builder: PromptBuilder, sessions: SessionManager, facts: PromptFacts
    ) -> None:
        self.sessions = sessions
        self.builder = builder
        self.facts = facts

    def build(
        self,
        prompt: Prompt,
        images: PromptImages,
        uses_cache: bool = True,
        adds_header: bool = True,
        is_counted: bool = False,
    ) -> tuple[SessionContext | None, BuiltPrompt]:
        """Return the session context and the prompt of a request. Raises RequestError.

        `is_counted`: the prompt is only counted and may be longer than the context. A raw prompt
        and a prompt that does not use the cache have no session context.
        """
        if is_raw(prompt):
            return None, self.builder.raw(prompt.text, prompt.ids, prompt.speaker.key)
        if prompt.images:
            messages = without_images(prompt, self.facts.model_name)
            prompt = dataclasses.replace(prompt, messages=messages, images={})
        context = self.sessions.request_arrived(prompt, uses_cache)
        if context is not None:
            context.images = images
        content = self.content(prompt, context, images)
        return context, self.builder.build(content, adds_header, is_counted)

    def raw_ids(self, prompt: Prompt, query: TokenQuery) -> list[int]:
        """Return the tokens of a raw prompt of any length. Raises: RequestError."""
        if prompt.text is None:
            self.builder.check_ids(prompt.ids)
            return prompt.ids
        text, tokeniser = prompt.text, self.builder.tokeniser
        if not query.reads_controls:
            text = tokeniser.shielded(text)
        ids = tokeniser.ids(text, prompt.speaker.key)
        return self.builder.with_beginning(ids) if query.adds_beginning else ids

    def content(
        self, prompt: Prompt, context: SessionContext | None, images: PromptImages
    ) -> PromptContent:
        """Return the messages for the template, with the remembered turns.

        The text of remembered turns serves only the prompt's API key.
        """
        messages, loaded = prompt.messages, list[str]()
        turns: Sequence[Turn | None] = ()
        if context is not None:
            messages, loaded, turns = context.messages, context.loaded, context.turns
        messages = with_loaded_tools(messages, prompt.deferred, loaded)
        if prompt.continues and turns:  # the client's own text begins the last turn
            turns = [*turns[:-1], None]
        return PromptContent(
            messages,
            prompt.tools,
            prompt.template_kwargs,
            turns,
            images,
            prompt.speaker.key,
            prompt.continues,
            prompt.thinking,
        )

    def explain(self, context: SessionContext, built: BuiltPrompt) -> None:
        """Set the context's divergence: where and why the prompt leaves the conversation."""
        tokens = built.keys
        assert 0 <= built.header <= len(tokens), (built.header, len(tokens))
        system_end = self.facts.cut_rule.system_end(tokens)
        context.set_prompt(tokens, built.header, built.kept, system_end)
        context.doubtful, context.prefix = built.doubtful, built.prefix

        def boundary(count: int) -> tuple[int, bool] | None:
            """Return how many tokens of `count` messages begin the prompt, and whether all do."""
            whole = self.content(context.prompt, context, context.images)
            part = dataclasses.replace(
                whole, messages=whole.messages[:count], turns=whole.turns[:count]
            )
            try:
                keys = self.builder.build(part, adds_header=False).keys
            except ClientLeft:
                raise
            except RequestError:  # a template may refuse a conversation that ends so
                return None
            covered = common_length(keys, tokens)
            return covered, covered == len(keys)

        context.divergence = explain(context, boundary, self.text, self.builder.preserves_thinking)

    def text(self, keys: Sequence[int]) -> str:
        """Return the text of tokens, with "[image]" for each image."""
        detokeniser = self.facts.vocabulary.detokeniser()
        parts = []
        for is_image, run in itertools.groupby(keys, lambda key: key < 0):
            parts.append(_IMAGE if is_image else "".join(map(detokeniser.add, run)))
        return "".join(parts)


def predict_next_prompt(request: Request, prompts: SessionPromptBuilder) -> PrefixQuery | None:
    """Return the beginning of the likely next prompt, without the next message. Prompt thread.

    Return None if the slot holds those tokens already, or if the template refuses the messages.
    """
    assert request.slot is None, request.request_id
    context, facts = request.session_context, prompts.facts
    if context is None or context.answer is None:
        return None
    try:
        # The conversation with the answer, and empty messages after the answer.
        echo, following = _continuation(context.answer, context.turn)
        content = prompts.content(context.prompt, context, context.images)
        before = len(content.messages) - content.continues
        content = dataclasses.replace(
            content,
            messages=[*content.messages[:before], echo, *following],
            turns=[*content.turns[:before], context.turn, *(None for _ in following)],
        )
        built = prompts.builder.build(content, adds_header=False)
    except RequestError as error:  # only the head start is lost
        log.debug("the next prompt cannot be foreseen: %s", error.code)
        return None
    ends = [request.end_id] if request.end_id is not None else []
    fed = keys_of([*request.ids, *request.sampled, *ends], request.query.images)
    tokens = built.keys[: prompts.builder.last_header(built.ids)]
    if common_length(tokens, fed) >= min(len(tokens), len(fed)):
        return None
    cuts, root = facts.cut_rule.natural(tokens), request.query.root or facts.root
    names = prefix_hashes(root, tokens, cuts)
    images = tuple(run.bare() for run in built.images if run.end <= len(tokens))
    return PrefixQuery(
        tokens,
        cuts,
        names,
        request.query.conversation,
        root=root,
        images=images,
        system_end=facts.cut_rule.system_end(tokens),
        adapter=request.query.adapter,
    )


def _continuation(
    said: TurnContent, turn: Turn | None
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return an answer as a client echoes it, and empty messages to follow the answer."""
    echo: dict[str, Any] = {"role": "assistant", "content": said.content}
    if said.reasoning:
        echo["reasoning_content"] = said.reasoning
    if not said.calls:
        return echo, [{"role": "user", "content": ""}]
    ids = turn.call_ids if turn is not None else ()
    if len(ids) != len(said.calls):  # the answer was cut off
        ids = tuple(f"call{n:05d}" for n in range(len(said.calls)))
    echo["tool_calls"] = [
        {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        for call_id, (name, arguments) in zip(ids, said.calls, strict=True)
    ]
    return echo, [{"role": "tool", "tool_call_id": call_id, "content": ""} for call_id in ids]


RECENT_MAX: Final = 64  # remembered prompts


class RecentPrompts:
    """Keeps the newest prompts by request id. Shared by the prompt threads.

    Invariant: at most `RECENT_MAX` prompts are kept, and none unless `is_on` (LOG_PROMPTS and an
    API key are set).
    """

    def __init__(self, is_on: bool) -> None:
        self._is_on = is_on
        # Kept for one key: tokens of 64 prompts (`LOG_PROMPTS`)
        self._by_request: dict[str, tuple[str, list[int]]] = {}  # request id -> API key digest, ids

    def add(self, message: Submit, ids: list[int]) -> None:
        """Remember a prompt, unless its request does not use the cache."""
        if not (self._is_on and message.use_kv_cache):
            return
        self._by_request[message.request_id] = (message.prompt.speaker.key, ids)
        while len(self._by_request) > RECENT_MAX:
            self._by_request.pop(next(iter(self._by_request)), None)  # another thread may pop first

    def ids_of(self, request_id: str, api_key: str) -> list[int] | None:
        """Return the ids of a prompt that this API key sent ("" = any key); None if unknown."""
        owner, ids = self._by_request.get(request_id, ("", None))
        return ids if api_key in ("", owner) else None


_NO_IMAGES: PromptImages = {}
CHARACTERS_MAX: Final = 16  # most characters of a token, except runs of blanks


class RequestBuilder:
    """Makes a Request of each Submit. The prompt threads share one builder.

    Invariant: `build` returns a complete request or raises a RequestError.
    """

    def __init__(
        self,
        prompts: SessionPromptBuilder,
        recent: RecentPrompts,
        default_max_tokens: int,
        suspects: Suspects | None = None,
    ) -> None:
        self._suspects = suspects or Suspects()
        self._prompts = prompts
        self._recent = recent
        self._facts = prompts.facts
        self._default_max_tokens = default_max_tokens

    def build(
        self, lease: ClientLease, message: Submit, images: PromptImages = _NO_IMAGES
    ) -> Request:
        """Return the complete request. Raises RequestError."""
        assert lease.request_id == message.request_id, (lease.request_id, message.request_id)
        check(message.sampling, self._facts.vocab_size)
        root = root_of(message, self._facts.root, self._facts.adapters)
        context, built = self._prompts.build(message.prompt, images, message.use_kv_cache)
        assert len(built.ids) == len(built.keys), (len(built.ids), len(built.keys))
        suspects = self._suspects.find(root, built.keys)
        self._recent.add(message, built.ids)
        if context is not None:
            context.adapter = message.adapter
        if context is not None and not message.prefill_only:
            self._prompts.explain(context, built)
        splitter, guide, calls = self._readers(message, built, context)
        new_id = self._prompts.sessions.new_id
        query, prompt_name = self._query(message, built, root, context)
        # Whether the answer continues a text of the prompt.
        goes_on = is_raw(message.prompt) or message.prompt.continues
        return Request(
            lease=lease,
            ids=built.ids,
            query=query,
            sampling=message.sampling,
            tokens_max=self._tokens_max(message, built),
            output=OutputProcessor(
                self._facts.vocabulary.detokeniser(built.ids if goes_on else ()),
                message.sampling.stop,
                splitter,
                message.constraints.parallel_calls,
            ),
            deltas=AnswerDeltas(
                message.request_id,
                new_id,
                frozenset(
                    call.get("id") or ""
                    for chat_message in message.prompt.messages
                    for call in chat_message.get("tool_calls") or ()
                ),
                signature=SIGNATURE_BEGIN + new_id(),
            ),
            api_key=message.prompt.speaker.key,
            queue_name=queue_name_of(
                message.prompt, goes_on=context is not None and context.is_continuation
            ),
            guide=guide,
            draft_sources=AnswerSources(
                built.ids, prediction=self._prediction(message, built), forced=calls
            ),
            warnings=self._facts.thinking.warnings(
                message.prompt.thinking, message.prompt.template_kwargs
            ),
            uses_cache=message.use_kv_cache,
            prefill_only=(
                PrefillOnly(message.prompt.speaker.key if message.pin else None)
                if message.prefill_only
                else None
            ),
            suspicion=Suspicion(prompt_name, suspects),
            # A prefill alone adds nothing to a session.
            session_context=None if message.prefill_only else context,
        )

    def _tokens_max(self, message: Submit, built: BuiltPrompt) -> int:
        """Return the limit of the answer: the requested tokens, or the rest of the context."""
        assert len(built.ids) < self._facts.context_tokens, len(built.ids)
        asked = message.sampling.max_tokens or self._default_max_tokens
        return min(asked, self._facts.context_tokens - len(built.ids))

    def _prediction(self, message: Submit, built: BuiltPrompt) -> list[int]:
        """Return the tokens of the client's prediction, cut to the longest allowed answer."""
        if self._facts.drafts.of(message.sampling.speculate) != "all":
            return []
        tokens = min(self._tokens_max(message, built), PREDICTION_TOKENS_MAX)
        return self._prompts.builder.tokeniser.unremembered_ids(
            message.prediction[: CHARACTERS_MAX * tokens]
        )[:tokens]

    def _query(
        self,
        message: Submit,
        built: BuiltPrompt,
        root: PrefixHash,
        context: SessionContext | None,
    ) -> tuple[PrefixQuery, PrefixHash]:
        """Return the prompt in the form for cache searches, with cuts, and the prompt's hash."""
        cuts = self._facts.cut_rule.cuts(built.keys)
        *names, whole = prefix_hashes(root, built.keys, [*cuts, len(built.keys)])
        number = context.conversation if context is not None else 0
        number = number or self._prompts.sessions.new_number()
        if context is not None:
            context.conversation = number
        conversation = Conversation(
            number,
            family_of(message.prompt),
            is_side=context is not None and context.line_match.is_side,
        )
        query = PrefixQuery(
            built.keys,
            cuts,
            names,
            conversation,
            root,
            built.images,
            self._facts.cut_rule.system_end(built.keys),
            adapter=message.adapter,
        )
        return query, whole

    def _readers(
        self, message: Submit, built: BuiltPrompt, context: SessionContext | None
    ) -> tuple[AnswerSplitter | None, TokenMask | None, CallDrafts | None]:
        """Return the answer's splitter, the guide that enforces constraints, and the call drafts.

        For a raw prompt all three are None. Raises RequestError.
        """
        prompt = message.prompt
        if is_raw(prompt):
            return None, None, None
        constraints = constraints_of(message)
        output_format = self._facts.output_format
        opening = "" if prompt.continues else self._prompts.text(built.ids[built.header :])
        splitter = output_format.splitter(
            output_format.is_thinking_open(opening),
            [*prompt.tools, *prompt.deferred],
            takes_calls=constraints.tool_choice != "none",
            may_think=output_format.may_think(opening) and not constraints.is_json,
            is_continued=prompt.continues,
        )
        shown = _shown_tools(
            prompt, [*constraints.tool_names, *(context.loaded if context else ())]
        )
        owner = prompt.speaker.key
        guide = None
        if not prompt.continues:
            guide = self._facts.grammar_compiler.token_mask(
                constraints, shown, opening, len(built.ids), owner
            )
        elif constraints.is_json or constraints.tool_choice == "required":
            raise RequestError(
                "An answer that continues the last message cannot be held to a schema, nor to a "
                "call. Let the conversation end with a user's message, or ask for neither.",
                param="messages",
            )
        keeps = owner if message.use_kv_cache else None
        calls = self._facts.grammar_compiler.call_drafts(constraints, shown, keeps)
        return splitter, guide, calls


def constraints_of(message: Submit) -> Constraints:
    """Return a request's constraints; the thinking budget is 0 if thinking is switched off.

    Even if thinking is off in the template, a model may open a think block, and then never write
    the constrained answer.
    """
    constraints = message.constraints
    is_off = message.prompt.thinking.on is False
    if not is_off or not (constraints.is_json or constraints.tool_choice == "required"):
        return constraints
    return replace(constraints, thinking_budget=0)


def root_of(
    message: Submit, root: PrefixHash, adapters: Mapping[str, str] = MappingProxyType({})
) -> PrefixHash:
    """Return the root of a prompt's hashes: `root` with the API key and the adapter mixed in.

    `adapters` maps each adapter's name to the identity of its files.

    Raises:
        RequestError: 404, if the worker has no such adapter.
    """
    if api_key := message.prompt.speaker.key:
        root = key_root(root, api_key)
    if not message.adapter:
        return root
    if message.adapter not in adapters:
        raise RequestError(
            f"The worker has no adapter {message.adapter!r:.80}; it has: "
            f"{', '.join(adapters) or 'none'}. Give it the same ADAPTERS as the server.",
            status=404,
            code="model_not_found",
            param="model",
        )
    return adapter_root(root, adapters[message.adapter])


def family_of(prompt: Prompt) -> str:
    """Return the name that all conversations of a session share, sub-agents included; "" = none."""
    speaker = prompt.speaker
    return queue_name_of(prompt, goes_on=True) if speaker.parent or speaker.session else ""


def queue_name_of(prompt: Prompt, *, goes_on: bool) -> str:
    """Return the name of a request's fair queue; a session and its sub-agents share one.

    A conversation without a session name has a queue of its own once it `goes_on` from an answer of
    this worker. All other requests of a client share one queue, so a program that sends a hundred
    questions at once has one queue, even if the questions contain examples of answers.
    """
    speaker = prompt.speaker
    if named := speaker.parent or speaker.session:
        return f"{speaker.key}/{named}"
    return f"{speaker.key}//{speaker.conversation if goes_on else speaker.client}"


def _shown_tools(prompt: Prompt, names: Sequence[str]) -> list[Any]:
    """Return the prompt's tools, and the deferred tools that are loaded or in `names`."""
    loaded = set(names)
    for message in prompt.messages:
        loaded.update(message.get("tool_references") or ())
    more = [tool for tool in prompt.deferred if tool["function"]["name"] in loaded]
    return [*prompt.tools, *more]
