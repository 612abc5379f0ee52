"""Builds a prompt's token ids from messages, with each known turn as it was sampled.

The template renders every message. The span of an assistant turn whose tokens are known, from its
header to its end-of-turn token, is then replaced by them. Where no header is seen, a turn begins
where the prompt is, token for token, what it was sampled behind. Any doubt about a span leaves what
was rendered. Touches no MLX.
"""

import hashlib
import itertools
import json
from collections import deque
from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from hearth.shared.errors import PromptTooLong, RequestError
from hearth.shared.wire_messages import ThinkingWish
from hearth.worker.cache.block_hash import HASH_BYTES, Tokens, pack
from hearth.worker.cache.image_keys import ImageRun, PromptImages, keys_of
from hearth.worker.prompt.chat_template import parts_of, text_of, text_part
from hearth.worker.prompt.render_messages import Renderer
from hearth.worker.prompt.template_turn_tokens import HistoryMarks
from hearth.worker.prompt.tokenise import ImageForm, PieceTokeniser, TextPiece, marked, pieces_of

UTF8_BYTES_MAX = 4  # of a character
COUNTED_BYTES_MAX = 16 * 1024 * 1024  # of a prompt that is only counted: 3 s of a thread


class Beginning(NamedTuple):
    """Names the first `tokens` of a prompt, images included, by their digest. Immutable.

    `chars` counts the characters of the text that they end with, 0 behind an added token or a turn.
    """

    tokens: int
    chars: int
    digest: bytes


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


class PromptIds:
    """A prompt's ids while they are put one behind the other, and the images among them.

    Owner: the prompt thread that builds the prompt.
    """

    def __init__(self, ids: list[int]) -> None:
        self.ids: list[int] = []
        self.images: list[ImageRun] = []
        self._chars = 0
        self._digest = hashlib.blake2b(digest_size=HASH_BYTES)
        self.extend(ids)

    @property
    def beginning(self) -> Beginning:
        """What a turn is sampled behind that begins at this place."""
        return Beginning(len(self.ids), self._chars, self._digest.digest())

    def extend(self, ids: Sequence[int]) -> None:
        """Add ids that are of no text of the template's: a turn, or what begins the prompt."""
        self.ids.extend(ids)
        self._chars = 0
        self._digest.update(pack(ids).tobytes())

    def add(self, piece: TextPiece) -> None:
        """Add a piece of what was rendered, or an image."""
        start = len(self.ids)
        self.extend(piece.ids)
        if piece.picture is not None:
            self.images.append(ImageRun(start, len(self.ids), piece.picture))
            self._digest.update(piece.picture.identity)
        elif not piece.is_added:
            self._chars = len(piece.text)

    def are(self, begins: Beginning, more: Sequence[int]) -> bool:
        """Whether the ids with `more` behind them are what `begins` names."""
        if len(self.ids) + len(more) != begins.tokens:
            return False
        digest = self._digest.copy()
        digest.update(pack(more).tobytes())
        return digest.digest() == begins.digest


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
        context_tokens: int,
        preserves_thinking: bool = True,
        form: ImageForm | None = None,
        context_by: str = "setting",
    ) -> None:
        """`form` has the text around the model's images; None where it takes none.

        `context_by` is what makes the context no longer, as ModelFacts has it.
        """
        self._form = form or ImageForm()
        self._renderer = renderer
        self.thinking = renderer.thinking
        self.tool_form = renderer.capabilities.tool_form  # in which prompts show tools
        self.tokeniser = tokeniser
        self._history = history
        self._context_tokens, self._context_by = context_tokens, context_by
        token_bytes = tokeniser.token_bytes_max
        # Text longer than this cannot fit, and is refused unread.
        self._bytes_max = token_bytes * context_tokens if token_bytes else None
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
        spans: dict[int, tuple[int, int]],
        content: PromptContent,
        runs: list[list[int]],
    ) -> frozenset[int]:
        """Add the pieces, with known turns in their places; return the messages of these turns."""
        # Of several answers in a row none is looked for by its beginning. The fewest tokens first.
        alone = {run[0] for run in runs if len(run) == 1} - {
            message for _, message in spans.values()
        }
        turns = [(content.turns[at], at) for at in alone if 0 <= at < len(content.turns)]
        known = [(turn.begins, at) for turn, at in turns if turn is not None and len(turn.ids)]
        waiting = deque(sorted((begins, at) for begins, at in known if begins is not None))
        kept, at = set(), 0
        while at < len(pieces):
            span = spans.get(at)
            lead: Sequence[int] = ()
            while waiting and waiting[0][0].tokens < len(prompt_ids.ids):
                waiting.popleft()
            reach = len(prompt_ids.ids) + UTF8_BYTES_MAX * len(pieces[at].text) + 1
            if span is None and waiting and waiting[0][0].tokens <= reach:
                limit = min((start for start in spans if start > at), default=len(pieces))
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
        messages, digests = marked(tokeniser.shielded(content.messages), mark)
        messages = list(map(tokeniser.kept_apart, messages))
        self._open_thinking(messages, content)
        try:
            rendered = self._renderer.rendered(
                messages,
                tokeniser.shielded(content.tools),
                tokeniser.shielded(content.options),
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
        pieces = pieces_of(tokeniser, rendered.text, pictures, self._form, content.owner)
        return pieces, rendered.runs

    def _open_thinking(self, messages: list[dict[str, Any]], content: PromptContent) -> None:
        """Unshield the tags around the thinking that an answer's content begins with, in place.

        Only where the template looks for them there, and in answers that stand as rendered.
        """
        if self._renderer.lifted_tags is None:
            return
        start, end = self._renderer.lifted_tags
        opened, closed = self.tokeniser.shielded([start, end])
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
    ) -> tuple[dict[int, tuple[int, int]], set[int]]:
        """Return (piece behind the last, message) of each turn to replace, by its first piece.

        And which known turns are in doubt. A run of assistant messages is rendered as a run of
        assistant headers: harmony writes one for each channel. Where the runs do not pair off, no
        span is certain.
        """
        doubtful = {at for at, turn in enumerate(content.turns) if turn is not None}
        if not doubtful:
            return {}, doubtful
        runs = self._header_runs(pieces)
        if len(runs) != len(said):
            return {}, doubtful
        spans = {}
        for headers, messages in zip(runs, said, strict=True):
            for (start, end), message in paired(headers, messages):
                if message in doubtful:
                    doubtful.remove(message)
                    turn, own = content.turns[message], content.messages[message]
                    assert turn is not None, "only known turns are in doubt"
                    shown = end_of_own(pieces[start:end], own, self._history.ends, turn.ids)
                    last = start + shown if shown else self._end_of(pieces, start, end)
                    if self._may_replace(pieces[start:last], turn, own):
                        spans[start] = (last, message)
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
            # A question stands behind its end where the header is what ends it: Mistral's [/INST].
            behind = pieces[self._end_of(pieces, at, following) + 1 : following]
            was_assistant = is_assistant and not any(piece.text.strip() for piece in behind)
        return runs

    def _generation_prompt(self, pieces: list[TextPiece]) -> int:
        """Return the piece where the generation prompt begins; behind all where none is seen.

        Where no header is, tokens that end the prompt are all of it: DeepSeek V3.2 goes on behind
        results with <think> alone.
        """
        places = reversed(range(len(pieces)))
        last = next((at for at in places if self._is_header(pieces, at)), len(pieces))
        # A turn that has ended is none that is to be written.
        is_open = self._end_of(pieces, last, len(pieces)) == len(pieces)
        if is_open and self._begins_own(pieces, last):
            return last
        texts = (at for at, piece in enumerate(pieces) if not piece.is_added and piece.text.strip())
        return max(texts, default=-1) + 1

    def _is_header(self, pieces: list[TextPiece], at: int) -> bool:
        is_first = pieces[at].is_added and pieces[at].ids[0] in self._history.header_ids
        return is_first and stands_at(pieces, at, (self._history.header_start,))

    def _begins_own(self, pieces: list[TextPiece], at: int) -> bool:
        """Whether a turn of the model's begins at piece `at`; behind all pieces none does."""
        return stands_at(pieces, at, self._history.assistant_texts) and self._is_header(pieces, at)

    def _end_of(self, pieces: list[TextPiece], start: int, end: int) -> int:
        """Return the piece that ends the turn in [start, end); `end` where the next header does."""
        return next((at for at in range(end - 1, start, -1) if self._is_end(pieces, at)), end)

    def _is_end(self, pieces: list[TextPiece], at: int) -> bool:
        return pieces[at].is_added and pieces[at].ids[0] in self._history.ends


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


# ---------------------------------------------------------------- what pieces show


def words_of(message: dict[str, Any]) -> list[str]:
    """Return the words of an assistant message of which a template shows one at least."""
    names = [call["function"]["name"] for call in message.get("tool_calls") or ()]
    words = (*(part["text"].strip() for part in parts_of(message)), *names)
    return [word for word in words if word]


def shows_all(message: dict[str, Any], text: str) -> bool:
    """Whether `text` shows all that an assistant's message says, in the order of writing.

    Its thinking comes first and may be missing. The search goes on behind it, since it may name
    what is called.
    """
    thinking = (message.get("reasoning_content") or "").strip()
    place = text.find(thinking) + len(thinking) if thinking in text else 0
    for word in words_of(message):
        place = text.find(word, place)
        if place < 0:
            return False
        place += len(word)
    return True


def shows_other(message: dict[str, Any], other: dict[str, Any], text: str) -> bool:
    """Whether `text` shows the `other` message, and not because `message` says the same."""
    said = text_of(other).strip()
    return bool(said) and said in text and json.dumps(said)[1:-1] not in json.dumps(message)


def ends_in(ids: Tokens, ends: Set[int]) -> int:
    """Return how many of a turn's tokens, behind the first, are `ends`."""
    return sum(token in ends for token in ids[1:].tolist())


def end_of_own(
    pieces: list[TextPiece], message: dict[str, Any], ends: Set[int], ids: Tokens
) -> int | None:
    """Return the piece that ends the turn of `message`, which begins with the first; None of none.

    The first by which all is shown that it says, behind the ends that its own `ids` have: Apertus
    puts results behind one end, and another behind them.
    """
    text, inner = pieces[0].text, ends_in(ids, ends)
    for at, piece in enumerate(pieces[1:], 1):
        if piece.is_added and piece.ids[0] in ends:
            if inner <= 0 and shows_all(message, text):
                return at
            inner -= 1
        text += piece.text
    return None


def stands_at(pieces: list[TextPiece], at: int, texts: tuple[str, ...]) -> bool:
    """Whether one of the texts begins with piece `at`; none is empty, and so no piece."""
    length = max(map(len, texts), default=0)
    return "".join(piece.text[:length] for piece in pieces[at : at + length]).startswith(texts)


def paired(
    headers: list[tuple[int, int]], messages: list[int]
) -> list[tuple[tuple[int, int], int]]:
    """Return which headers each message has: all where it is alone, else one each, else none."""
    if len(messages) == 1:
        return [((headers[0][0], headers[-1][1]), messages[0])]
    return list(zip(headers, messages, strict=True)) if len(headers) == len(messages) else []
