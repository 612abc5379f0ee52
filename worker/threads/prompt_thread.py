"""The prompt thread: turns a Submit into a Request, and answers Count. Touches no MLX."""

import dataclasses
import itertools
import logging
import queue
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hearth.shared.errors import RequestError
from hearth.shared.load_settings import Settings
from hearth.shared.wire_messages import (
    Admitted,
    Count,
    Counted,
    Failed,
    Prompt,
    Status,
    Submit,
    Told,
    Up,
)
from hearth.worker.cache.block_hash import PrefixHash, common_length, key_root, prefix_hashes
from hearth.worker.cache.image_keys import PromptImages, keys_of
from hearth.worker.cache.prefix_search import PrefixQuery
from hearth.worker.constraint.grammar_compiler import GrammarCompiler
from hearth.worker.constraint.token_mask import TokenMask
from hearth.worker.engine.sampler import check
from hearth.worker.prompt.deferred_tools import with_loaded_tools
from hearth.worker.prompt.extract_thinking import with_thinking_extracted
from hearth.worker.prompt.images.image_placeholders import without_images
from hearth.worker.prompt.prefill_cuts import CutRule
from hearth.worker.prompt.prompt_builder import BuiltPrompt, PromptBuilder, PromptContent
from hearth.worker.schedule.request_state import (
    ClientLease,
    MessageWithImages,
    RenderNextPrompt,
    Request,
)
from hearth.worker.sessions.echoed_turn_match import TurnContent
from hearth.worker.sessions.find_divergence import explain
from hearth.worker.sessions.session_manager import SessionManager, SessionVisit
from hearth.worker.sessions.turn_store import Turn
from hearth.worker.stream.answer_splitter import AnswerSplitter
from hearth.worker.stream.detokenise import Vocabulary
from hearth.worker.stream.model_output_format import OutputFormat
from hearth.worker.stream.output_processor import OutputProcessor

log = logging.getLogger(__name__)

RECENT_MAX = 64  # prompts whose ids CACHE_DEBUG remembers

PromptJob = Submit | Count | Status | RenderNextPrompt | MessageWithImages
Look = Callable[[ClientLease, Submit | Count], None]

_NO_PICTURES: PromptImages = {}
_IMAGE = "[image]"


@dataclass(frozen=True, slots=True)
class PromptFacts:
    """What prompts need to know of the model."""

    context_tokens: int
    vocab_size: int
    root: PrefixHash
    opens_thinking: bool  # whether its template's generation prompt does
    reader: OutputFormat  # tells what the model writes
    constrainer: GrammarCompiler  # holds it to what it has to write
    model_name: str = ""
    # Reads the images of a request, which comes back as Seen; None for a model that takes none.
    look: Look | None = None


class PromptThread:
    """Renders and tokenises, so that a long text stalls neither decoding nor heartbeats.

    A RequestError ends the one request; it becomes its Failed.
    """

    def __init__(
        self,
        settings: Settings,
        builder: PromptBuilder,
        sessions: SessionManager,
        rule: CutRule,
        vocabulary: Vocabulary,
        facts: PromptFacts,
    ) -> None:
        self._settings = settings
        self._builder = builder
        self._sessions = sessions
        self._rule = rule
        self._vocabulary = vocabulary
        self._facts = facts
        self._recent: dict[str, tuple[str, list[int]]] = {}  # request id -> key, ids

    def run(
        self,
        jobs: "queue.SimpleQueue[tuple[ClientLease, PromptJob] | None]",
        put: Callable[[Request | PrefixQuery], None],
        send: Callable[[Up], None],
    ) -> None:
        """Work until None comes."""
        while (job := jobs.get()) is not None:
            ticket, message = job
            if isinstance(message, RenderNextPrompt):
                if (query := self.foreseen(message.request)) is not None:
                    put(query)
                continue
            message, pictures = _unpacked(message)
            if ticket.is_gone:
                send(Failed(message.request_id, 499, "client_closed", "The client is gone."))
                continue
            try:
                if isinstance(message, Status):
                    send(Told(message.request_id, self._told(message)))
                elif message.prompt.images and self._facts.look is not None:
                    self._facts.look(ticket, message)
                elif isinstance(message, Count):
                    built = self._build(message.prompt, pictures)[1]
                    send(Counted(message.request_id, len(built.ids)))
                else:
                    request = self.request(ticket, message, pictures)
                    send(Admitted(request.request_id, request.prompt_tokens, request.signature))
                    put(request)
            except RequestError as error:
                log.info("refused request=%s code=%s", message.request_id, error.code)
                send(Failed(message.request_id, error.status, error.code, str(error)))

    def _told(self, message: Status) -> dict[str, Any]:
        """Return what is asked about prompts and sessions. Raises RequestError."""
        if message.what == "sessions":
            return {"sessions": self._sessions.report(message.key)}
        if message.what in ("session", "tree"):
            sessions, is_brief = self._sessions, message.what == "tree"
            told = sessions.session_brief if is_brief else sessions.session_report
            body = told(message.about, message.key)
            text = f"No session {message.about!r:.80} is remembered by this worker."
        else:
            key, ids = self._recent.get(message.about, ("", None))
            is_told = ids is not None and message.key in ("", key)
            body = {"ids": ids} if is_told else None
            text = f"No prompt of request {message.about!r:.80} is remembered by this worker."
        if body is None:
            raise RequestError(text, status=404, code="not_found")
        return body

    def _remember(self, message: Submit, ids: list[int]) -> None:
        """Keep the ids of recent prompts where debugging is on, of those that may be kept."""
        if not (self._settings.cache_debug and message.use_kv_cache):
            return
        self._recent[message.request_id] = (message.prompt.speaker.key, ids)
        while len(self._recent) > RECENT_MAX:
            del self._recent[next(iter(self._recent))]

    def request(
        self, ticket: ClientLease, message: Submit, pictures: PromptImages = _NO_PICTURES
    ) -> Request:
        """Return the request ready to be computed. Raises RequestError."""
        check(message.sampling, self._facts.vocab_size)
        visit, built = self._build(message.prompt, pictures, message.use_kv_cache)
        ids = built.ids
        self._remember(message, ids)
        if visit is not None and not message.prefill_only:
            self._explain(visit, built, pictures)
        asked = message.sampling.max_tokens or self._settings.default_max_tokens
        is_side = visit is not None and visit.is_side
        splitter, guide = self._split_and_guided(message, built, visit)
        return Request(
            ticket=ticket,
            ids=ids,
            query=self._query(message, built, is_side),
            sampling=message.sampling,
            tokens_max=min(asked, self._facts.context_tokens - len(ids)),
            output=OutputProcessor(
                self._vocabulary.detokeniser(),
                message.sampling.stop,
                splitter,
                message.constraints.parallel_calls,
            ),
            asker=_asker(message.prompt),
            new_id=self._sessions.new_id,
            signature=self._sessions.new_id(),
            guide=guide,
            is_kept=message.use_kv_cache,
            is_prefill=message.prefill_only,
            pin_key=message.prompt.speaker.key if message.pin else None,
            pictures=pictures,
            visit=None if message.prefill_only else visit,  # nobody has said or heard anything
        )

    def _query(self, message: Submit, built: BuiltPrompt, is_side: bool) -> PrefixQuery:
        root, cuts = self._root(message), self._rule.cuts(built.keys)
        names = prefix_hashes(root, built.keys, cuts)
        family = _family(message.prompt)
        return PrefixQuery(built.keys, cuts, names, family, is_side, root, built.images)

    def _split_and_guided(
        self, message: Submit, built: BuiltPrompt, visit: SessionVisit | None
    ) -> tuple[AnswerSplitter | None, TokenMask | None]:
        """Return what takes the answer apart, and what holds it to its constraints.

        The completion of a raw prompt has neither. Raises RequestError.
        """
        prompt, constraints, reader = message.prompt, message.constraints, self._facts.reader
        if _is_raw(prompt):
            return None, None
        opening = self._text(built.ids[built.header :])
        tools = [*prompt.tools, *prompt.deferred]
        splitter = reader.splitter(
            reader.is_thinking_open(opening),
            tools,
            takes_calls=constraints.tool_choice != "none",
            may_think=reader.may_think(opening) and not constraints.is_json,
        )
        shown = _shown_tools(prompt, [*constraints.tool_names, *(visit.loaded if visit else ())])
        guide = self._facts.constrainer.token_mask(constraints, shown, opening, len(built.ids))
        return splitter, guide

    # ------------------------------------------------------------ what is asked

    def _build(
        self, prompt: Prompt, pictures: PromptImages, is_kept: bool = True
    ) -> tuple[SessionVisit | None, BuiltPrompt]:
        """Return what is known of the request, and its tokens. Raises RequestError.

        Of one that is not to be kept nothing is known.
        """
        if _is_raw(prompt):
            return None, self._builder.raw(prompt.text, prompt.ids)
        if prompt.images:
            messages = without_images(prompt, self._facts.model_name)
            prompt = dataclasses.replace(prompt, messages=messages, images={})
        visit = self._sessions.arrive(prompt, is_kept)
        return visit, self._builder.build(self._content(prompt, visit, pictures))

    def _content(
        self, prompt: Prompt, visit: SessionVisit | None, pictures: PromptImages
    ) -> PromptContent:
        messages, loaded = prompt.messages, list[str]()
        if visit is not None:
            messages = visit.messages
            loaded = visit.loaded
        start, end = self._facts.reader.think_marks
        is_opened = self._facts.opens_thinking
        messages = with_loaded_tools(messages, prompt.deferred, loaded)
        messages = [with_thinking_extracted(message, start, end, is_opened) for message in messages]
        turns = visit.turns if visit is not None else ()
        return PromptContent(messages, prompt.tools, prompt.template_kwargs, turns, pictures)

    def _explain(self, visit: SessionVisit, built: BuiltPrompt, pictures: PromptImages) -> None:
        """Find out what the request loses against its own line."""
        tokens = built.keys
        visit.set_prompt(tokens, built.header, built.kept)
        visit.doubtful = built.doubtful

        def boundary(count: int) -> tuple[int, bool] | None:
            """Return how many of the prompt's tokens its first `count` messages make."""
            whole = self._content(visit.prompt, visit, pictures)
            part = dataclasses.replace(
                whole, messages=whole.messages[:count], turns=whole.turns[:count]
            )
            try:
                keys = self._builder.build(part, adds_header=False).keys
            except RequestError:  # a template may refuse a conversation that ends there
                return None
            covered = common_length(keys, tokens)
            return covered, covered == len(keys)

        visit.divergence = explain(visit, boundary, self._text)

    # ------------------------------------------------------------ what will be asked

    def foreseen(self, request: Request) -> PrefixQuery | None:
        """Return the beginning of the prompt that follows an answer, where it is not in a slot yet.

        It ends where the next message begins. None where the answer's own tokens stand there as
        they were fed, or where the template refuses such a conversation.
        """
        visit = request.visit
        if visit is None or visit.said is None:
            return None
        echo, following = _continuation(visit.said, visit.turn)
        content = self._content(visit.prompt, visit, request.pictures)
        more = [echo, *following]
        content = dataclasses.replace(
            content,
            messages=[*content.messages, *more],
            turns=[*content.turns, visit.turn, *(None for _ in following)],
        )
        try:
            built = self._builder.build(content, adds_header=False)
        except RequestError as error:  # nothing is lost but the head start
            log.debug("the next prompt cannot be foreseen: %s", error.code)
            return None
        ends = [request.end_id] if request.end_id is not None else []
        fed = keys_of([*request.ids, *request.sampled, *ends], request.query.images)
        tokens = built.keys[: self._builder.last_header(built.ids)]
        if common_length(tokens, fed) >= min(len(tokens), len(fed)):
            return None
        cuts = self._rule.natural(tokens)
        root = request.query.root or self._facts.root
        names = prefix_hashes(root, tokens, cuts)
        images = tuple(run.bare() for run in built.images if run.end <= len(tokens))
        return PrefixQuery(tokens, cuts, names, _family(visit.prompt), root=root, images=images)

    def _root(self, message: Submit) -> PrefixHash:
        """Return what a prompt's names begin with: where there are several keys, its key's own."""
        root = self._facts.root
        return key_root(root, message.prompt.speaker.key) if message.is_apart else root

    def _text(self, keys: Sequence[int]) -> str:
        """Return what tokens say; an image among them is "[image]"."""
        detokeniser = self._vocabulary.detokeniser()
        parts = []
        for is_image, run in itertools.groupby(keys, lambda key: key < 0):
            parts.append(_IMAGE if is_image else "".join(map(detokeniser.add, run)))
        return "".join(parts)


def _unpacked(
    message: Submit | Count | Status | MessageWithImages,
) -> tuple[Submit | Count | Status, PromptImages]:
    """Return the message, and the pictures of one whose images have been read."""
    if not isinstance(message, MessageWithImages):
        return message, _NO_PICTURES
    prompt = dataclasses.replace(message.message.prompt, images={})
    return dataclasses.replace(message.message, prompt=prompt), message.pictures


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


def _shown_tools(prompt: Prompt, names: Sequence[str]) -> list[Any]:
    """Return the tools that the prompt shows; of the deferred ones those loaded, or in `names`."""
    loaded = set(names)
    for message in prompt.messages:
        loaded.update(message.get("tool_references") or ())
    more = [tool for tool in prompt.deferred if tool["function"]["name"] in loaded]
    return [*prompt.tools, *more]


def _is_raw(prompt: Prompt) -> bool:
    """Whether the prompt goes to the model as it is, without a template."""
    return prompt.text is not None or bool(prompt.ids)


def _family(prompt: Prompt) -> str:
    """Return what all lines of one session have in common, its sub-agents' sessions included."""
    speaker = prompt.speaker
    return _asker(prompt) if speaker.parent or speaker.session else ""


def _asker(prompt: Prompt) -> str:
    """Return whose turn for a slot a request uses.

    That is its session's, its sub-agents included; requests that name none share their key's.
    """
    speaker = prompt.speaker
    return f"{speaker.key}/{speaker.parent or speaker.session}"
