"""Turns a Submit into a Request: the prompt's tokens, its cuts, its constraints, its reader."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Final

from hearth.shared.errors import RequestError
from hearth.shared.our_ids import SIGNATURE_BEGIN
from hearth.shared.wire_messages import Constraints, Prompt, Submit
from hearth.worker.cache.block_hash import PrefixHash, adapter_root, key_root, prefix_hashes
from hearth.worker.cache.conversation_priority import Conversation
from hearth.worker.cache.image_keys import PromptImages
from hearth.worker.cache.prefix_search import PrefixQuery
from hearth.worker.constraint.call_drafts import CallDrafts
from hearth.worker.constraint.token_mask import TokenMask
from hearth.worker.draft.answer_drafter import PREDICTION_TOKENS_MAX, AnswerSources
from hearth.worker.engine.decode.sampler import check
from hearth.worker.prompt.prompt_with_sampled_turns import BuiltPrompt
from hearth.worker.schedule.client_lease import ClientLease
from hearth.worker.schedule.request_state import AnswerDeltas, PrefillOnly, Request, Suspicion
from hearth.worker.schedule.suspects import Suspects
from hearth.worker.sessions.session_visit import SessionVisit
from hearth.worker.stream.answer_splitter import AnswerSplitter
from hearth.worker.stream.output_processor import OutputProcessor
from hearth.worker.threads.session_prompt_builder import SessionPromptBuilder, is_raw

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
            key=message.prompt.speaker.key,
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
        visit: SessionVisit | None,
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
            is_side=visit is not None and visit.is_side,
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
        self, message: Submit, built: BuiltPrompt, visit: SessionVisit | None
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
