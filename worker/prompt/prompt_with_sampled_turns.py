"""Builds a prompt's token ids from messages, with each known turn as it was sampled.

The template renders every message. The span of an assistant turn whose tokens are known, from its
header to its end-of-turn token, is then replaced by them. Where no header is seen, a turn begins
where the prompt is what it was sampled behind. Any doubt about a span leaves what was rendered.
Touches no MLX.
"""

import itertools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from hearth.shared.errors import PromptTooLong, RequestError
from hearth.shared.wire_messages import ThinkingWish
from hearth.worker.cache.block_hash import Tokens, pack
from hearth.worker.cache.image_keys import ImageRun, PromptImages, keys_of
from hearth.worker.prompt.chat_template import parts_of, text_part
from hearth.worker.prompt.images.image_placeholders import ImageForm, marked, pieces_of
from hearth.worker.prompt.render_messages import Renderer
from hearth.worker.prompt.template_turn_tokens import HistoryMarks
from hearth.worker.prompt.tokenise import PieceTokeniser, TextPiece
from hearth.worker.prompt.turn_beginnings import (
    Beginning,
    PromptIds,
    end_of_own,
    ends_in,
    paired,
    shows_all,
    shows_other,
    stands_at,
    words_of,
)

UTF8_BYTES_MAX = 4  # of a character
COUNTED_BYTES_MAX = 16 * 1024 * 1024  # of a prompt that is only counted: 3 s of a thread


class SampledTurn(Protocol):
    """A turn as the model wrote it: the session's record of it."""

    @property
    def ids(self) -> Tokens:
        """Its generation prompt and what was sampled, without the end-of-turn token."""

    @property
    def thinking(self) -> str:
        """What the model thought."""

    @property
    def begins(self) -> Beginning | None:
        """What it was sampled behind; None where that is not known."""


@dataclass(frozen=True, slots=True)
class PromptContent:
    """The parts that a prompt is made of. Immutable.

    `turns`, where it is not empty, has an entry for each message: its tokens, if known. `pictures`
    has every image that the messages show. What is remembered of the text serves `owner` alone,
    "" = everybody. Where the answer `continues` the last message, that one has no turn.
    """

    messages: list[dict[str, Any]]
    tools: list[Any]
    options: dict[str, Any] = field(default_factory=dict)
    turns: Sequence[SampledTurn | None] = ()
    pictures: PromptImages = field(default_factory=dict)
    owner: str = ""
    continues: bool = False
    thinking: ThinkingWish = field(default_factory=ThinkingWish)


@dataclass(frozen=True, slots=True)
class BuiltPrompt:
    """A prompt's tokens. `header` is where the generation prompt begins. Immutable.

    Where the answer continues a message, that is where this message's header begins.

    `keys` are those of the cache: its ids, with the images' contents in the place of their ids.
    """

    ids: list[int]
    keys: Tokens
    images: tuple[ImageRun, ...]
    header: int
    kept: frozenset[int]  # messages that stand there as they were sampled
    doubtful: int  # turns whose tokens were known, and whose span was not found
    begins: Beginning | None = None  # what its answer is sampled behind


class ContextLimit(NamedTuple):
    """The longest context, and what makes it no longer, as ModelFacts has it."""

    tokens: int
    by: str = "setting"


class PromptBuilder:
    """Builds prompts for one model. The prompt threads share it; it never changes.

    Invariant: a span is replaced only by a turn that begins with the same token, or that was
    sampled behind the very tokens that stand before it.
    """

    def __init__(
        self,
        renderer: Renderer,
        tokeniser: PieceTokeniser,
        history: HistoryMarks,
        context: ContextLimit,
        preserves_thinking: bool = True,
        form: ImageForm | None = None,
    ) -> None:
        """`form` has the text around the model's images; None where it takes none."""
        self._form = form or ImageForm()
        self._renderer = renderer
        self.thinking = renderer.thinking
        self.tool_form = renderer.capabilities.tool_form  # in which prompts show tools
        self.tokeniser = tokeniser
        self._history = history
        self._context_tokens, self._context_by = context
        token_bytes = tokeniser.token_bytes_max
        # Text longer than this cannot fit, and is refused unread.
        self._bytes_max = token_bytes * self._context_tokens if token_bytes else None
        self.preserves_thinking = preserves_thinking

    def build(
        self, content: PromptContent, adds_header: bool = True, is_counted: bool = False
    ) -> BuiltPrompt:
        """Return the prompt of `content`; `is_counted`: nothing computes it.

        Raises:
            RequestError: the template refuses these messages, or they exceed the context; of a
                counted prompt, they exceed what is counted.
        """
        assert len(content.turns) in (0, len(content.messages)), len(content.turns)
        pieces, runs = self._pieces(content, adds_header, is_counted)
        header = self._generation_prompt(pieces) if adds_header else len(pieces)
        said = pieces if content.continues else pieces[:header]
        spans, doubtful = self._spans(said, content, runs)
        # A template writes its own beginning-of-text token; without one the tokenizer must.
        prompt_ids = PromptIds([] if self._renderer.has_template else self.tokeniser.beginning)
        kept = self._replaced(prompt_ids, pieces[:header], spans, content, runs)
        begins = prompt_ids.beginning
        for piece in pieces[header:]:
            prompt_ids.add(piece)
        ids, images = prompt_ids.ids, tuple(prompt_ids.images)
        self._check(ids, "The messages render to nothing.", "messages", is_counted)
        if images and images[-1].end == len(ids):
            raise RequestError(
                "The model's chat template puts nothing behind the image that the messages end "
                "with. Send some text behind it.",
                param="messages",
            )
        keys, header, unfound = keys_of(ids, images), begins.tokens, len(doubtful - kept)
        return BuiltPrompt(ids, keys, images, header, kept, unfound, begins)

    def _replaced(
        self,
        prompt_ids: PromptIds,
        pieces: list[TextPiece],
        spans: list[tuple[int, int, int]],
        content: PromptContent,
        runs: list[list[int]],
    ) -> frozenset[int]:
        """Add the pieces, with known turns in their places; return the messages of these turns."""
        found = {start: (end, message) for start, end, message in spans}
        # Of several answers in a row none is looked for by its beginning.
        waiting = _waiting(content, {r[0] for r in runs if len(r) == 1} - {s[2] for s in spans})
        kept, at = set(), 0
        while at < len(pieces):
            span = found.get(at)
            lead: Sequence[int] = ()
            while waiting and waiting[0][0].tokens < len(prompt_ids.ids):
                waiting.popleft()
            reach = len(prompt_ids.ids) + UTF8_BYTES_MAX * len(pieces[at].text) + 1
            if span is None and waiting and waiting[0][0].tokens <= reach:
                limit = min((start for start in found if start > at), default=len(pieces))
                lead, span = self._begun(prompt_ids, pieces[:limit], at, *waiting[0], content)
            if span is None:
                prompt_ids.add(pieces[at])
                at += 1
                continue
            end, message = span
            turn = content.turns[message]
            assert at <= end and turn is not None, "only spans of known turns are replaced"
            prompt_ids.extend([*lead, *turn.ids.tolist()])
            kept.add(message)
            # Command writes <|END_RESPONSE|> itself, which ends the turn in its template.
            doubled = {turn.ids[-1]} & self._history.ends - self._history.header_ids
            at = end + (end < len(pieces) and {*pieces[end].ids} == doubled)
        return frozenset(kept)

    def raw(self, text: str | None, ids: list[int], owner: str = "") -> BuiltPrompt:
        """Return the prompt that a client wrote itself: `text` if there is one, or else `ids`.

        No template is applied. A text is tokenised as the caller's own template: the control
        tokens that it spells out are control tokens, and it begins as the tokenizer has any text
        begin. Ids are taken as they are.

        Raises:
            RequestError: an id is none of the tokenizer's, or the prompt is empty or too long.
        """
        if text is not None:
            self._refuse_long(text, "prompt")
            ids = self.with_beginning(self.tokeniser.ids(text, owner=owner))
        else:
            self.check_ids(ids)
        self._check(ids, "The prompt is empty.", "prompt")
        return BuiltPrompt(ids, pack(ids), (), len(ids), frozenset(), 0)

    def with_beginning(self, ids: list[int]) -> list[int]:
        """Return the tokens of a text as the tokenizer has any text begin."""
        beginning = self.tokeniser.beginning
        return ids if ids[: len(beginning)] == beginning else [*beginning, *ids]

    def check_ids(self, ids: list[int]) -> None:
        """Raise RequestError where one of `ids` is none of the tokenizer's."""
        if wrong := [each for each in ids if not 0 <= each < self.tokeniser.vocab_size]:
            raise RequestError(
                f"The prompt has {len(wrong):,} ids that are no token of this model, such as "
                f"{wrong[0]}. Send ids from 0 to {self.tokeniser.vocab_size - 1:,}.",
                param="prompt",
            )

    def last_header(self, ids: Sequence[int]) -> int:
        """Return where the last message's header begins; 0 where none is seen."""
        headers = (at for at in range(len(ids) - 1, 0, -1) if ids[at] in self._history.header_ids)
        return next(headers, 0)

    def _pieces(
        self, content: PromptContent, adds_header: bool, is_counted: bool
    ) -> tuple[list[TextPiece], list[list[int]]]:
        """Return what is rendered, and the runs of the model's own messages in it."""
        tokeniser, mark = self.tokeniser, self.tokeniser.mark
        messages, digests = marked(tokeniser.shielded(content.messages, mark), mark)
        messages = [tokeniser.kept_apart(message, mark) for message in messages]
        self._open_thinking(messages, content, mark)
        try:
            rendered = self._renderer.rendered(
                messages,
                tokeniser.shielded(content.tools, mark),
                tokeniser.shielded(content.options, mark),
                adds_header and not content.continues,
                adds_header and content.continues,
                content.thinking,
            )
        except RequestError as error:  # it may cite what it refuses
            error.args = (str(error).replace(mark, ""),)
            raise
        text = rendered.text.replace(mark, "")
        if is_counted:
            _refuse_uncounted(text, self._bytes_max or 0)
        else:
            self._refuse_long(text, "messages")
        if lost := [digest for digest in digests if digest not in content.pictures]:
            raise RequestError(f"The image {lost[0]:.80} is in the messages and was not sent.")
        pictures = [content.pictures[digest] for digest in digests]
        pieces = pieces_of(tokeniser, rendered.text, mark, pictures, self._form, content.owner)
        return pieces, rendered.runs

    def _open_thinking(
        self, messages: list[dict[str, Any]], content: PromptContent, mark: str
    ) -> None:
        """Unshield the tags around the thinking that an answer's content begins with, in place.

        Only where the template looks for them there, and in answers that stand as rendered.
        """
        if self._renderer.lifted_tags is None:
            return
        start, end = self._renderer.lifted_tags
        opened, closed = self.tokeniser.shielded([start, end], mark)
        for at, message in enumerate(messages[: len(messages) - content.continues]):
            is_known = content.turns and content.turns[at]
            if message["role"] != "assistant" or message.get("reasoning_content") or is_known:
                continue
            first, *others = parts_of(message)
            said = first["text"]
            if said.lstrip().startswith(opened) and closed in said:
                said = said.replace(opened, start, 1).replace(closed, end, 1)
                messages[at] = {
                    **message,
                    "content": [text_part(said), *others] if others else said,
                }

    def _refuse_long(self, text: str, param: str) -> None:
        """Raise where a text cannot fit, whatever its tokens are: it is not tokenised at all."""
        if self._bytes_max is None or UTF8_BYTES_MAX * len(text) <= self._bytes_max:
            return
        size = len(text.encode("utf-8", "surrogatepass"))
        if size > self._bytes_max:
            raise RequestError(
                f"The prompt is {size:,} bytes and this server's context is "
                f"{self._context_tokens:,} tokens, which no more than {self._bytes_max:,} bytes "
                f"can be. Remove at least {size - self._bytes_max:,} bytes.",
                code="context_length_exceeded",
                param=param,
            )

    def _check(self, ids: list[int], if_none: str, param: str, is_counted: bool = False) -> None:
        if len(ids) >= self._context_tokens and not is_counted:
            tokens_max = self._context_tokens - 1
            raise PromptTooLong(tokens=len(ids), tokens_max=tokens_max, context_by=self._context_by)
        if not ids:
            raise RequestError(f"{if_none} Send some text.", param=param)

    # ------------------------------------------------------------ the spans of turns

    def _spans(
        self, pieces: list[TextPiece], content: PromptContent, said: list[list[int]]
    ) -> tuple[list[tuple[int, int, int]], set[int]]:
        """Return (first piece, piece behind the last, message) of each turn to replace, in order.

        And which known turns are in doubt. A run of assistant messages is rendered as a run of
        assistant headers: harmony writes one for each channel. Where the runs do not pair off, no
        span is certain.
        """
        doubtful = {at for at, turn in enumerate(content.turns) if turn is not None}
        if not doubtful:
            return [], doubtful
        runs = self._header_runs(pieces)
        if len(runs) != len(said):
            return [], doubtful
        spans = []
        for headers, messages in zip(runs, said, strict=True):
            for (start, end), message in paired(headers, messages):
                if message in doubtful:
                    doubtful.remove(message)
                    turn, own = content.turns[message], content.messages[message]
                    assert turn is not None, "only known turns are in doubt"
                    shown = end_of_own(pieces[start:end], own, self._history.ends, turn.ids)
                    last = start + shown if shown else self._end_of(pieces, start, end)
                    if self._may_replace(pieces[start:last], turn, own):
                        spans.append((start, last, message))
        return spans, doubtful

    def _may_replace(
        self, pieces: list[TextPiece], turn: SampledTurn, message: dict[str, Any]
    ) -> bool:
        """Whether the turn of `message` may stand as sampled, in the place of these pieces.

        Its tokens begin with a header, the pieces show something of its message, and no thinking
        that has to go is in it.
        """
        if not len(turn.ids) or turn.ids[0] != pieces[0].ids[0]:
            return False
        text = "".join(piece.text for piece in pieces)
        shown = words_of(message)
        if shown and not any(word in text for word in shown):
            return False
        if self._history.moves_words and len(shown) > 1 and shown[0] not in text:
            return False
        return self.preserves_thinking or turn.thinking.strip() in text

    def _begun(
        self,
        prompt_ids: PromptIds,
        pieces: list[TextPiece],
        at: int,
        begins: Beginning,
        message: int,
        content: PromptContent,
    ) -> tuple[Sequence[int], tuple[int, int] | None]:
        """Return (ids, (end, message)) of a turn that begins in piece `at`, or ((), None).

        The ids are of the text that the piece has in front of the turn. `end` is the piece with the
        first end of a turn by which all is shown that this one says: harmony ends its parts too.
        """
        turn, piece, own = content.turns[message], pieces[at], content.messages[message]
        assert turn is not None, "only known turns are looked for"
        lead: Sequence[int] = ()
        missing = begins.tokens - len(prompt_ids.ids)
        is_in_text = not piece.is_added and 0 < begins.chars < len(piece.text)
        if is_in_text and 0 < missing <= UTF8_BYTES_MAX * begins.chars + 1:
            lead = self.tokeniser.text_ids(piece.text[: begins.chars], at == 0, content.owner)
        if not prompt_ids.are(begins, lead):
            return (), None
        text, inner = "", ends_in(turn.ids, self._history.ends)
        for end in range(at, len(pieces)):
            is_first = end == at and (lead or pieces[at].ids[0] == turn.ids[0])
            if not is_first and self._is_end(pieces, end):
                if shows_all(own, text):
                    may = self._may_stand(pieces[end + 1 :], text, message, content)
                    return lead, (end, message) if may else None
                inner -= 1
            is_others = self._is_header(pieces, end) and not self._begins_own(pieces, end)
            if inner < 0 or (is_others and pieces[end].ids[0] != turn.ids[0]):
                break  # another message stands there now
            text += pieces[end].text[begins.chars if lead and end == at else 0 :]
        return (), None

    def _may_stand(
        self, behind: list[TextPiece], text: str, message: int, content: PromptContent
    ) -> bool:
        """Whether `text` is the turn of `message` and no more, and none of it is `behind`."""
        turn, own = content.turns[message], content.messages[message]
        assert turn is not None, "only known turns are looked for"
        if message and shows_other(own, content.messages[message - 1], text):
            return False
        for other in content.messages[message + 1 : message + 2]:
            at = next((at for at, piece in enumerate(behind) if piece.text.strip()), len(behind))
            goes_on = other["role"] != "assistant" and self._begins_own(behind, at)
            if goes_on or shows_other(own, other, text):
                return False
        return self.preserves_thinking or turn.thinking.strip() in text

    def _header_runs(self, pieces: list[TextPiece]) -> list[list[tuple[int, int]]]:
        """Return runs of assistant headers: (its piece, the piece of the next header)."""
        headers = [at for at in range(len(pieces)) if self._is_header(pieces, at)]
        runs: list[list[tuple[int, int]]] = []
        was_assistant = False
        for at, following in itertools.pairwise([*headers, len(pieces)]):
            is_assistant = self._begins_own(pieces, at)
            if pieces[at].ids[0] in self._history.closing:
                # It begins no turn that ends: `[/TOOL_RESULTS]` in front of the next result.
                is_assistant = is_assistant and self._end_of(pieces, at, following) < following
            if is_assistant:
                if not was_assistant:
                    runs.append([])
                runs[-1].append((at, following))
            was_assistant = is_assistant and self._ends_at(pieces, at, following)
        return runs

    def _ends_at(self, pieces: list[TextPiece], start: int, end: int) -> bool:
        """Whether nothing stands between the end of the turn in [start, end) and the next header.

        A question does where the header is what ends it, as Mistral's [/INST].
        """
        behind = pieces[self._end_of(pieces, start, end) + 1 : end]
        return not any(piece.text.strip() for piece in behind)

    def _generation_prompt(self, pieces: list[TextPiece]) -> int:
        """Return the piece where the generation prompt begins; behind all where none is seen.

        Where no header is, tokens that end the prompt are all of it: DeepSeek V3.2 goes on behind
        results with <think> alone.
        """
        for at in range(len(pieces) - 1, -1, -1):
            if self._is_header(pieces, at):
                # A turn that has ended is none that is to be written.
                is_open = self._end_of(pieces, at, len(pieces)) == len(pieces)
                if is_open and self._begins_own(pieces, at):
                    return at
                break
        texts = (at for at, piece in enumerate(pieces) if not piece.is_added and piece.text.strip())
        return max(texts, default=-1) + 1

    def _is_header(self, pieces: list[TextPiece], at: int) -> bool:
        is_first = pieces[at].is_added and pieces[at].ids[0] in self._history.header_ids
        return is_first and stands_at(pieces, at, (self._history.header_start,))

    def _begins_own(self, pieces: list[TextPiece], at: int) -> bool:
        """Whether a turn of the model's begins at piece `at`; behind all pieces none does."""
        begins_own = stands_at(pieces, at, self._history.assistant_texts)
        return begins_own and self._is_header(pieces, at)

    def _end_of(self, pieces: list[TextPiece], start: int, end: int) -> int:
        """Return the piece that ends the turn in [start, end); `end` where the next header does."""
        for at in range(end - 1, start, -1):
            if self._is_end(pieces, at):
                return at
        return end

    def _is_end(self, pieces: list[TextPiece], at: int) -> bool:
        return pieces[at].is_added and pieces[at].ids[0] in self._history.ends


def _waiting(content: PromptContent, messages: set[int]) -> deque[tuple[Beginning, int]]:
    """Return what the known turns of `messages` were sampled behind, the fewest tokens first."""
    turns = [(content.turns[at], at) for at in messages if 0 <= at < len(content.turns)]
    known = [(turn.begins, at) for turn, at in turns if turn is not None and len(turn.ids)]
    return deque(sorted((begins, at) for begins, at in known if begins is not None))


def _refuse_uncounted(text: str, context_bytes: int) -> None:
    """Raise where a text is too long to be counted: a prompt of the context's size never is."""
    size, most = len(text.encode("utf-8", "surrogatepass")), max(context_bytes, COUNTED_BYTES_MAX)
    if size > most:
        raise RequestError(
            f"The prompt is {size:,} bytes and {most:,} are counted. Count it in parts.",
            status=413,
            code="text_too_long",
            param="messages",
        )
