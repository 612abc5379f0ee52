"""Turns a Submit into a Request: the prompt's tokens, its cuts, its constraints, its reader.

A prompt is rendered with what its session remembers: sampled turns, loaded tools, thinking. So is
the one that is likely to follow it, which idle time can prefill.
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
    """Holds what a request needs of the model. Never changes; the prompt threads share it."""

    context_tokens: int
    vocab_size: int
    root: PrefixHash  # the name of the empty prefix
    output_format: OutputFormat  # reads what the model writes
    grammar_compiler: GrammarCompiler  # holds the model to what it has to write
    vocabulary: Vocabulary
    cut_rule: CutRule  # where prefills are cut
    model_name: str = ""
    drafts: DraftPolicy = field(default_factory=DraftPolicy)  # what is drafted for answers
    thinking: ThinkingSwitches = field(default_factory=ThinkingSwitches)
    adapters: Mapping[str, str] = field(default_factory=dict)  # by name: what tells its bytes


_IMAGE: Final = "[image]"


def is_raw(prompt: Prompt) -> bool:
    """Return whether the prompt goes to the model as it is, without a template."""
    return prompt.text is not None or bool(prompt.ids)


class SessionPromptBuilder:
    """Builds prompts from messages and from what their sessions remember. Any prompt thread.

    Invariant: what the model sampled stands in a later prompt as it was sampled, where it is known.
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
        """Return what is known of the request, and its tokens. Raises RequestError.

        `is_counted`: nothing computes it, and it may be longer than the context. Nothing is known
        of a raw prompt, nor of one that neither reads nor writes the cache.
        """
        if is_raw(prompt):
            return None, self.builder.raw(prompt.text, prompt.ids, prompt.speaker.key)
        if prompt.images:
            messages = without_images(prompt, self.facts.model_name)
            prompt = dataclasses.replace(prompt, messages=messages, images={})
        visit = self.sessions.arrive(prompt, uses_cache)
        if visit is not None:
            visit.images = images
        content = self.content(prompt, visit, images)
        return visit, self.builder.build(content, adds_header, is_counted)

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
        self, prompt: Prompt, visit: SessionContext | None, images: PromptImages
    ) -> PromptContent:
        """Return the messages as the template is to see them, with the turns that are known.

        What is remembered of their texts serves the prompt's key alone.
        """
        messages, loaded = prompt.messages, list[str]()
        turns: Sequence[Turn | None] = ()
        if visit is not None:
            messages, loaded, turns = visit.messages, visit.loaded, visit.turns
        messages = with_loaded_tools(messages, prompt.deferred, loaded)
        if prompt.continues and turns:  # it is not over: the client's text says how far it goes
            turns = [*turns[:-1], None]
        return PromptContent(
            *(messages, prompt.tools, prompt.template_kwargs, turns, images, prompt.speaker.key),
            *(prompt.continues, prompt.thinking),
        )

    def explain(self, visit: SessionContext, built: BuiltPrompt) -> None:
        """Find out what the request loses against its own line; note it in its visit."""
        tokens = built.keys
        assert 0 <= built.header <= len(tokens), (built.header, len(tokens))
        system_end = self.facts.cut_rule.system_end(tokens)
        visit.set_prompt(tokens, built.header, built.kept, system_end)
        visit.doubtful, visit.prefix = built.doubtful, built.prefix

        def boundary(count: int) -> tuple[int, bool] | None:
            """Return how many of the prompt's tokens its first `count` messages make."""
            whole = self.content(visit.prompt, visit, visit.images)
            part = dataclasses.replace(
                whole, messages=whole.messages[:count], turns=whole.turns[:count]
            )
            try:
                keys = self.builder.build(part, adds_header=False).keys
            except ClientLeft:
                raise
            except RequestError:  # a template may refuse a conversation that ends there
                return None
            covered = common_length(keys, tokens)
            return covered, covered == len(keys)

        visit.divergence = explain(visit, boundary, self.text, self.builder.preserves_thinking)

    def text(self, keys: Sequence[int]) -> str:
        """Return the text of tokens; an image among them is "[image]"."""
        detokeniser = self.facts.vocabulary.detokeniser()
        parts = []
        for is_image, run in itertools.groupby(keys, lambda key: key < 0):
            parts.append(_IMAGE if is_image else "".join(map(detokeniser.add, run)))
        return "".join(parts)


def predict_next_prompt(request: Request, prompts: SessionPromptBuilder) -> PrefixQuery | None:
    """Return the beginning of the prompt that follows an answer. Prompt thread.

    It ends where the next message begins. None where the answer's own tokens stand there as they
    were fed, so that the slot holds them, or where the template refuses such a conversation.
    """
    assert request.slot is None, request.request_id
    visit, facts = request.visit, prompts.facts
    if visit is None or visit.answer is None:
        return None
    try:
        # The conversation with the answer, and the messages that will follow it, empty.
        echo, following = _continuation(visit.answer, visit.turn)
        content = prompts.content(visit.prompt, visit, visit.images)
        before = len(content.messages) - content.continues
        content = dataclasses.replace(
            content,
            messages=[*content.messages[:before], echo, *following],
            turns=[*content.turns[:before], visit.turn, *(None for _ in following)],
        )
        built = prompts.builder.build(content, adds_header=False)
    except RequestError as error:  # nothing is lost but the head start
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
    """Return an answer as a client echoes it, and what it will send behind it, empty."""
    echo: dict[str, Any] = {"role": "assistant", "content": said.content}
    if said.reasoning:
        echo["reasoning_content"] = said.reasoning
    if not said.calls:
        return echo, [{"role": "user", "content": ""}]
    ids = turn.call_ids if turn is not None else ()
    if len(ids) != len(said.calls):  # it was cut off
        ids = tuple(f"call{n:05d}" for n in range(len(said.calls)))
    echo["tool_calls"] = [
        {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        for call_id, (name, arguments) in zip(ids, said.calls, strict=True)
    ]
    return echo, [{"role": "tool", "tool_call_id": call_id, "content": ""} for call_id in ids]


RECENT_MAX: Final = 64  # prompts whose ids are remembered


class RecentPrompts:
    """Keeps the newest prompts by request id. The prompt threads share it.

    Invariant: it holds at most `RECENT_MAX`, and none unless `is_on` (LOG_PROMPTS, and a key).
    """

    def __init__(self, is_on: bool) -> None:
        self._is_on = is_on
        # Kept for one key: tokens of 64 prompts (`LOG_PROMPTS`)
        self._by_request: dict[str, tuple[str, list[int]]] = {}  # request id -> key digest, ids

    def add(self, message: Submit, ids: list[int]) -> None:
        """Remember a prompt, unless its client wants nothing of it kept."""
        if not (self._is_on and message.use_kv_cache):
            return
        self._by_request[message.request_id] = (message.prompt.speaker.key, ids)
        while len(self._by_request) > RECENT_MAX:
            self._by_request.pop(next(iter(self._by_request)), None)  # or another thread did

    def ids_of(self, request_id: str, key: str) -> list[int] | None:
        """Return a prompt's ids, for the API key that sent it; "" = any key. None if unknown."""
        owner, ids = self._by_request.get(request_id, ("", None))
        return ids if key in ("", owner) else None


_NO_IMAGES: PromptImages = {}
CHARACTERS_MAX: Final = 16  # of a token, but for runs of blanks


class RequestBuilder:
    """Makes a Request of each Submit. The prompt threads share it.

    Invariant: a request is either complete or refused by a RequestError; it leaves as a whole.
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
        """Return the request ready to be computed. Raises RequestError."""
        assert lease.request_id == message.request_id, (lease.request_id, message.request_id)
        check(message.sampling, self._facts.vocab_size)
        root = root_of(message, self._facts.root, self._facts.adapters)
        visit, built = self._prompts.build(message.prompt, images, message.use_kv_cache)
        assert len(built.ids) == len(built.keys), (len(built.ids), len(built.keys))
        found = self._suspects.among(root, built.keys)
        self._recent.add(message, built.ids)
        if visit is not None:
            visit.adapter = message.adapter
        if visit is not None and not message.prefill_only:
            self._prompts.explain(visit, built)
        splitter, guide, calls = self._readers(message, built, visit)
        new_id = self._prompts.sessions.new_id
        query, prompt_name = self._query(message, built, root, visit)
        goes_on = is_raw(message.prompt) or message.prompt.continues  # from text in the prompt
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
                    for each in message.prompt.messages
                    for call in each.get("tool_calls") or ()
                ),
                signature=SIGNATURE_BEGIN + new_id(),
            ),
            api_key=message.prompt.speaker.key,
            asker=asker_of(message.prompt, goes_on=visit is not None and visit.goes_on),
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
            suspicion=Suspicion(prompt_name, found),
            visit=None if message.prefill_only else visit,  # nobody has said or heard anything
        )

    def _tokens_max(self, message: Submit, built: BuiltPrompt) -> int:
        """Return how long the answer may be: what was asked for, or what the context has left."""
        assert len(built.ids) < self._facts.context_tokens, len(built.ids)
        asked = message.sampling.max_tokens or self._default_max_tokens
        return min(asked, self._facts.context_tokens - len(built.ids))

    def _prediction(self, message: Submit, built: BuiltPrompt) -> list[int]:
        """Return the tokens of what the client expects, as far as an answer can get."""
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
        visit: SessionContext | None,
    ) -> tuple[PrefixQuery, PrefixHash]:
        """Return the prompt as the cache searches it, with its prefill's cuts; and its hash."""
        cuts = self._facts.cut_rule.cuts(built.keys)
        *names, whole = prefix_hashes(root, built.keys, [*cuts, len(built.keys)])
        number = visit.conversation if visit is not None else 0
        number = number or self._prompts.sessions.new_number()
        if visit is not None:
            visit.conversation = number
        conversation = Conversation(
            number,
            family_of(message.prompt),
            is_side=visit is not None and visit.line_match.is_side,
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
        self, message: Submit, built: BuiltPrompt, visit: SessionContext | None
    ) -> tuple[AnswerSplitter | None, TokenMask | None, CallDrafts | None]:
        """Return what takes the answer apart, holds it to its constraints, and drafts its calls.

        The completion of a raw prompt has none of them. Raises RequestError.
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
        shown = _shown_tools(prompt, [*constraints.tool_names, *(visit.loaded if visit else ())])
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
    """Return a request's constraints, without room to think where thinking is switched off.

    A model may open a think block although its template was told. Behind it an answer that has to
    have a form may never come.
    """
    constraints = message.constraints
    is_off = message.prompt.thinking.on is False
    if not is_off or not (constraints.is_json or constraints.tool_choice == "required"):
        return constraints
    return replace(constraints, thinking_budget=0)


def root_of(
    message: Submit, root: PrefixHash, adapters: Mapping[str, str] = MappingProxyType({})
) -> PrefixHash:
    """Return what a prompt's hashes begin with: its key's own where there are several, its adapter.

    `adapters` has by the name of each what tells its bytes.

    Raises:
        RequestError: 404, the worker has no such adapter.
    """
    if key := message.prompt.speaker.key:
        root = key_root(root, key)
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
    """Return what all lines of one session have in common, its sub-agents' sessions included."""
    speaker = prompt.speaker
    return asker_of(prompt, goes_on=True) if speaker.parent or speaker.session else ""


def asker_of(prompt: Prompt, *, goes_on: bool) -> str:
    """Return whose turn for a slot a request uses: its session's, its sub-agents included.

    A conversation that no client names has a turn of its own once it `goes_on` from what was
    answered here. All others of a client share one: a program that asks a hundred things at once is
    one asker, also where it puts examples of answers, or the beginning of one, into its questions.
    """
    speaker = prompt.speaker
    if named := speaker.parent or speaker.session:
        return f"{speaker.key}/{named}"
    return f"{speaker.key}//{speaker.conversation if goes_on else speaker.client}"


def _shown_tools(prompt: Prompt, names: Sequence[str]) -> list[Any]:
    """Return the tools that the prompt shows; of the deferred ones those loaded, or in `names`."""
    loaded = set(names)
    for message in prompt.messages:
        loaded.update(message.get("tool_references") or ())
    more = [tool for tool in prompt.deferred if tool["function"]["name"] in loaded]
    return [*prompt.tools, *more]
