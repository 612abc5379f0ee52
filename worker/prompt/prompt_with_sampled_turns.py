"""Builds a prompt's token ids from messages, with the sampled tokens of each recorded turn.

The template renders every message. If an assistant turn's tokens are recorded, these tokens replace
the turn's rendered span, from the header to the end-of-turn token. If the span has no header, the
turn begins where the prompt's tokens equal the prefix after which the turn was sampled. A doubtful
span stays as rendered. Does not touch MLX.
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

UTF8_BYTES_MAX = 4  # bytes of a character
COUNTED_BYTES_MAX = 16 * 1024 * 1024  # for a prompt that is only counted: 3 s of a thread


class PromptPrefix(NamedTuple):
    """Names the first `tokens` of a prompt, images included, by a digest. Immutable.

    `chars` is the length in characters of the last text piece; 0 after an added token or a turn.
    """

    tokens: int
    chars: int
    digest: bytes


class SampledTurn(Protocol):
    """A session's record of a turn that the model wrote."""

    @property
    def ids(self) -> Tokens:
        """The generation prompt and the sampled tokens, without the end-of-turn token."""

    @property
    def thinking(self) -> str:
        """The model's thinking."""

    @property
    def prefix(self) -> PromptPrefix | None:
        """The prefix after which the turn was sampled, if known."""


@dataclass(frozen=True, slots=True)
class PromptContent:
    """The parts that a prompt is made of. Immutable.

    `turns`, unless empty, has the recorded turn of each message, or None. `images` has every image
    of the messages. Text is remembered for `owner` alone, "" = for everybody. If the answer
    `continues` the last message, this message has no turn.
    """

    messages: list[dict[str, Any]]
    tools: list[Any]
    options: dict[str, Any] = field(default_factory=dict)
    turns: Sequence[SampledTurn | None] = ()
    images: PromptImages = field(default_factory=dict)
    owner: str = ""
    continues: bool = False
    thinking: ThinkingWish = field(default_factory=ThinkingWish)


@dataclass(frozen=True, slots=True)
class BuiltPrompt:
    """A prompt's tokens. Immutable.

    `header` is the position of the generation prompt, or of the header of the message that the
    answer continues.

    `keys` are what the cache compares: the ids, but for each image keys of the image's content.
    """

    ids: list[int]
    keys: Tokens
    images: tuple[ImageRun, ...]
    header: int
    kept: frozenset[int]  # messages whose tokens in the prompt are the sampled tokens
    doubtful: int  # turns with known tokens, but no span in the rendered text
    prefix: PromptPrefix | None = None  # tokens before the answer


class PromptIds:
    """A prompt's ids and images while they are being appended.

    Owner: the prompt thread that builds the prompt.
    """

    def __init__(self, ids: list[int]) -> None:
        self.ids: list[int] = []
        self.images: list[ImageRun] = []
        self._chars = 0
        self._digest = hashlib.blake2b(digest_size=HASH_BYTES)
        self.extend(ids)

    @property
    def prefix(self) -> PromptPrefix:
        """The prefix of a turn that begins at the current end."""
        return PromptPrefix(len(self.ids), self._chars, self._digest.digest())

    def extend(self, ids: Sequence[int]) -> None:
        """Append ids that the template has not rendered: a turn, or the prompt's beginning."""
        self.ids.extend(ids)
        self._chars = 0
        self._digest.update(pack(ids).tobytes())

    def add(self, piece: TextPiece) -> None:
        """Append a rendered piece or an image."""
        start = len(self.ids)
        self.extend(piece.ids)
        if piece.image is not None:
            self.images.append(ImageRun(start, len(self.ids), piece.image))
            self._digest.update(piece.image.identity)
        elif not piece.is_added:
            self._chars = len(piece.text)

    def match(self, prefix: PromptPrefix, more: Sequence[int]) -> bool:
        """Return whether the ids, followed by `more`, are the tokens that `prefix` names."""
        if len(self.ids) + len(more) != prefix.tokens:
            return False
        digest = self._digest.copy()
        digest.update(pack(more).tobytes())
        return digest.digest() == prefix.digest


class PromptBuilder:
    """Builds prompts for one model. Immutable: the prompt threads share one builder.

    Invariant: a span is replaced only by a turn that begins with the same token, or that was
    sampled after exactly the tokens before the span.
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
        """Take the model's parts.

        `form` has the text around images; None if the model takes no images. `context_by` names
        what limits the context, as in ModelFacts.
        """
        self._form = form or ImageForm()
        self._renderer = renderer
        self.thinking = renderer.thinking
        self.tool_form = renderer.capabilities.tool_form  # form of tools in prompts
        self.tokeniser = tokeniser
        self._history = history
        self._context_tokens, self._context_by = context_tokens, context_by
        token_bytes = tokeniser.token_bytes_max
        # A longer text cannot fit, and is refused before it is tokenised.
        self._bytes_max = token_bytes * context_tokens if token_bytes else None
        self.preserves_thinking = preserves_thinking

    def build(
        self, content: PromptContent, adds_header: bool = True, is_counted: bool = False
    ) -> BuiltPrompt:
        """Return the prompt of `content`; `is_counted`: the prompt will not be computed.

        Raises:
            RequestError: the template refuses these messages, or they exceed the context. A counted
                prompt may exceed the context, but not the limit of counting.
        """
        assert len(content.turns) in (0, len(content.messages)), len(content.turns)
        pieces, runs = self._pieces(content, adds_header, is_counted)
        header = self._generation_prompt(pieces) if adds_header else len(pieces)
        answer_pieces = pieces if content.continues else pieces[:header]
        spans, doubtful = self._spans(answer_pieces, content, runs)
        # A template writes the beginning-of-text token; without a template the tokenizer must.
        prompt_ids = PromptIds([] if self._renderer.has_template else self.tokeniser.beginning)
        kept = self._replaced(prompt_ids, pieces[:header], spans, content, runs)
        prefix = prompt_ids.prefix
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
        keys, header, unfound = keys_of(ids, images), prefix.tokens, len(doubtful - kept)
        return BuiltPrompt(ids, keys, images, header, kept, unfound, prefix)

    def _replaced(
        self,
        prompt_ids: PromptIds,
        pieces: list[TextPiece],
        spans: dict[int, tuple[int, int]],
        content: PromptContent,
        runs: list[list[int]],
    ) -> frozenset[int]:
        """Append the pieces and the recorded turns; return the messages of these turns."""
        # Only single answers are searched by prefix, the shortest prefix first.
        alone = {run[0] for run in runs if len(run) == 1} - {
            message for _, message in spans.values()
        }
        turns = [(content.turns[at], at) for at in alone if 0 <= at < len(content.turns)]
        known = [(turn.prefix, at) for turn, at in turns if turn is not None and len(turn.ids)]
        waiting = deque(sorted((prefix, at) for prefix, at in known if prefix is not None))
        kept, at = set(), 0
        while at < len(pieces):
            span = spans.get(at)
            lead_ids: Sequence[int] = ()
            while waiting and waiting[0][0].tokens < len(prompt_ids.ids):
                waiting.popleft()
            reach = len(prompt_ids.ids) + UTF8_BYTES_MAX * len(pieces[at].text) + 1
            if span is None and waiting and waiting[0][0].tokens <= reach:
                limit = min((start for start in spans if start > at), default=len(pieces))
                lead_ids, span = self._turn_at_prefix(
                    prompt_ids, pieces[:limit], at, *waiting[0], content
                )
            if span is None:
                prompt_ids.add(pieces[at])
                at += 1
                continue
            end, message = span
            turn = content.turns[message]
            assert at <= end and turn is not None, "a span without a known turn is replaced"
            prompt_ids.extend([*lead_ids, *turn.ids.tolist()])
            kept.add(message)
            # Command's models write <|END_RESPONSE|>, and the template adds another.
            doubled = {turn.ids[-1]} & self._history.ends - self._history.header_ids
            at = end + (end < len(pieces) and {*pieces[end].ids} == doubled)
        return frozenset(kept)

    def raw(self, text: str | None, ids: list[int], owner: str = "") -> BuiltPrompt:
        """Return the prompt that a client wrote itself: `text` if there is one, else `ids`.

        No template is applied. Control tokens that the text spells out become control tokens, and
        the tokenizer's usual beginning is added. Ids stay unchanged.

        Raises:
            RequestError: an id is not in the vocabulary, or the prompt is empty or too long.
        """
        if text is not None:
            self._refuse_long(text, "prompt")
            ids = self.with_beginning(self.tokeniser.ids(text, owner=owner))
        else:
            self.check_ids(ids)
        self._check(ids, "The prompt is empty.", "prompt")
        return BuiltPrompt(ids, pack(ids), (), len(ids), frozenset(), 0)

    def with_beginning(self, ids: list[int]) -> list[int]:
        """Return the tokens of a text, with the tokenizer's usual beginning."""
        beginning = self.tokeniser.beginning
        return ids if ids[: len(beginning)] == beginning else [*beginning, *ids]

    def check_ids(self, ids: list[int]) -> None:
        """Raise RequestError if one of `ids` is not in the vocabulary."""
        if wrong := [token_id for token_id in ids if not 0 <= token_id < self.tokeniser.vocab_size]:
            raise RequestError(
                f"The prompt has {len(wrong):,} ids that are no token of this model, such as "
                f"{wrong[0]}. Send ids from 0 to {self.tokeniser.vocab_size - 1:,}.",
                param="prompt",
            )

    def last_header(self, ids: Sequence[int]) -> int:
        """Return where the last message's header begins; 0 if none is found."""
        headers = (at for at in range(len(ids) - 1, 0, -1) if ids[at] in self._history.header_ids)
        return next(headers, 0)

    def _pieces(
        self, content: PromptContent, adds_header: bool, is_counted: bool
    ) -> tuple[list[TextPiece], list[list[int]]]:
        """Return the rendered pieces, and the runs of the model's own messages."""
        tokeniser, mark = self.tokeniser, self.tokeniser.mark
        messages, digests = marked(tokeniser.shielded(content.messages), mark)
        messages = list(map(tokeniser.kept_apart, messages))
        self._open_thinking(messages, content)
        try:
            rendered = self._renderer.render(
                messages,
                tokeniser.shielded(content.tools),
                tokeniser.shielded(content.options),
                adds_header and not content.continues,
                adds_header and content.continues,
                content.thinking,
            )
        except RequestError as error:  # the error's text may quote shielded content
            error.args = (str(error).replace(mark, ""),)
            raise
        text = rendered.text.replace(mark, "")
        if is_counted:
            _refuse_uncounted(text, self._bytes_max or 0)
        else:
            self._refuse_long(text, "messages")
        if missing := [digest for digest in digests if digest not in content.images]:
            raise RequestError(f"The image {missing[0]:.80} is in the messages and was not sent.")
        images = [content.images[digest] for digest in digests]
        pieces = pieces_of(tokeniser, rendered.text, images, self._form, content.owner)
        return pieces, rendered.runs

    def _open_thinking(self, messages: list[dict[str, Any]], content: PromptContent) -> None:
        """Unshield the tags around thinking at the beginning of an answer's content, in place.

        This is done only if the template looks for such tags, and for answers without a turn.
        """
        if self._renderer.lifted_tags is None:
            return
        start, end = self._renderer.lifted_tags
        shielded_start, shielded_end = self.tokeniser.shielded([start, end])
        for at, message in enumerate(messages[: len(messages) - content.continues]):
            is_known = content.turns and content.turns[at]
            if message["role"] != "assistant" or message.get("reasoning_content") or is_known:
                continue
            first, *others = parts_of(message)
            text = first["text"]
            if text.lstrip().startswith(shielded_start) and shielded_end in text:
                text = text.replace(shielded_start, start, 1).replace(shielded_end, end, 1)
                messages[at] = {
                    **message,
                    "content": [text_part(text), *others] if others else text,
                }

    def _refuse_long(self, text: str, param: str) -> None:
        """Raise if an untokenised text cannot fit, whatever tokens it would become."""
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
        self, pieces: list[TextPiece], content: PromptContent, message_runs: list[list[int]]
    ) -> tuple[dict[int, tuple[int, int]], set[int]]:
        """Return (end piece, message) of each turn to replace, by first piece.

        The end piece is after the last piece. Also return the recorded turns that are in doubt. A
        run of assistant messages is rendered as a run of assistant headers; harmony writes a header
        for each channel. If the numbers of runs differ, no span is certain.
        """
        doubtful = {at for at, turn in enumerate(content.turns) if turn is not None}
        if not doubtful:
            return {}, doubtful
        runs = self._header_runs(pieces)
        if len(runs) != len(message_runs):
            return {}, doubtful
        spans = {}
        for headers, messages in zip(runs, message_runs, strict=True):
            for (start, end), message in paired_headers(headers, messages):
                if message in doubtful:
                    doubtful.remove(message)
                    turn, message_content = content.turns[message], content.messages[message]
                    assert turn is not None, "a turn in doubt has no record"
                    shown = end_of_own(
                        pieces[start:end], message_content, self._history.ends, turn.ids
                    )
                    last = start + shown if shown else self._end_of(pieces, start, end)
                    if self._may_replace(pieces[start:last], turn, message_content):
                        spans[start] = (last, message)
        return spans, doubtful

    def _may_replace(
        self, pieces: list[TextPiece], turn: SampledTurn, message: dict[str, Any]
    ) -> bool:
        """Return whether the sampled turn of `message` may replace these pieces.

        It may if the turn begins with the same header, the pieces show some of the message's words,
        and the turn has no thinking that must be left out.
        """
        if not len(turn.ids) or turn.ids[0] != pieces[0].ids[0]:
            return False
        text = "".join(piece.text for piece in pieces)
        words = words_of(message)
        if words and not any(word in text for word in words):
            return False
        if self._history.moves_words and len(words) > 1 and words[0] not in text:
            return False
        return self.preserves_thinking or turn.thinking.strip() in text

    def _turn_at_prefix(
        self,
        prompt_ids: PromptIds,
        pieces: list[TextPiece],
        at: int,
        prefix: PromptPrefix,
        message: int,
        content: PromptContent,
    ) -> tuple[Sequence[int], tuple[int, int] | None]:
        """Return (ids, (end, message)) of a turn that begins in piece `at`, or ((), None).

        The ids are those of the piece's text before the turn. `end` is the first piece that ends a
        turn after all words of the message were shown, because harmony also ends parts of a turn.
        """
        turn, piece, message_content = content.turns[message], pieces[at], content.messages[message]
        assert turn is not None, "a turn without a record is looked for"
        lead_ids: Sequence[int] = ()
        missing = prefix.tokens - len(prompt_ids.ids)
        is_in_text = not piece.is_added and 0 < prefix.chars < len(piece.text)
        if is_in_text and 0 < missing <= UTF8_BYTES_MAX * prefix.chars + 1:
            lead_ids = self.tokeniser.text_ids(piece.text[: prefix.chars], at == 0, content.owner)
        if not prompt_ids.match(prefix, lead_ids):
            return (), None
        text, inner_ends = "", ends_in(turn.ids, self._history.ends)
        for end in range(at, len(pieces)):
            is_first = end == at and (lead_ids or pieces[at].ids[0] == turn.ids[0])
            if not is_first and self._is_end(pieces, end):
                if shows_all(message_content, text):
                    may_stand = self._may_stand(pieces[end + 1 :], text, message, content)
                    return lead_ids, (end, message) if may_stand else None
                inner_ends -= 1
            is_other_header = self._is_header(pieces, end) and not self._begins_own(pieces, end)
            if inner_ends < 0 or (is_other_header and pieces[end].ids[0] != turn.ids[0]):
                break  # another message begins here
            text += pieces[end].text[prefix.chars if lead_ids and end == at else 0 :]
        return (), None

    def _may_stand(
        self, behind: list[TextPiece], text: str, message: int, content: PromptContent
    ) -> bool:
        """Return whether `text` is all of the turn of `message`, and `behind` has no rest of it."""
        turn, message_content = content.turns[message], content.messages[message]
        assert turn is not None, "a turn without a record is looked for"
        if message and shows_other(message_content, content.messages[message - 1], text):
            return False
        for other in content.messages[message + 1 : message + 2]:
            at = next((at for at, piece in enumerate(behind) if piece.text.strip()), len(behind))
            turn_goes_on = other["role"] != "assistant" and self._begins_own(behind, at)
            if turn_goes_on or shows_other(message_content, other, text):
                return False
        return self.preserves_thinking or turn.thinking.strip() in text

    def _header_runs(self, pieces: list[TextPiece]) -> list[list[tuple[int, int]]]:
        """Return runs of assistant headers, each as (header's piece, next header's piece)."""
        headers = [at for at in range(len(pieces)) if self._is_header(pieces, at)]
        runs: list[list[tuple[int, int]]] = []
        was_assistant = False
        for at, following in itertools.pairwise([*headers, len(pieces)]):
            is_assistant = self._begins_own(pieces, at)
            if pieces[at].ids[0] in self._history.closing:
                # `[/TOOL_RESULTS]` before another result begins no turn of the model.
                is_assistant = is_assistant and self._end_of(pieces, at, following) < following
            if is_assistant:
                if not was_assistant:
                    runs.append([])
                runs[-1].append((at, following))
            # Mistral's header [/INST] ends the question, so text after an answer may be a question.
            behind = pieces[self._end_of(pieces, at, following) + 1 : following]
            was_assistant = is_assistant and not any(piece.text.strip() for piece in behind)
        return runs

    def _generation_prompt(self, pieces: list[TextPiece]) -> int:
        """Return the piece where the generation prompt begins, or the end if none is found.

        Without a header, the added tokens at the end are the generation prompt: after results,
        DeepSeek V3.2 writes only <think>.
        """
        positions = reversed(range(len(pieces)))
        last = next((at for at in positions if self._is_header(pieces, at)), len(pieces))
        # A turn that has ended is not the turn to be generated.
        is_open = self._end_of(pieces, last, len(pieces)) == len(pieces)
        if is_open and self._begins_own(pieces, last):
            return last
        texts = (at for at, piece in enumerate(pieces) if not piece.is_added and piece.text.strip())
        return max(texts, default=-1) + 1

    def _is_header(self, pieces: list[TextPiece], at: int) -> bool:
        is_first = pieces[at].is_added and pieces[at].ids[0] in self._history.header_ids
        return is_first and stands_at(pieces, at, (self._history.header_start,))

    def _begins_own(self, pieces: list[TextPiece], at: int) -> bool:
        """Return whether a turn of the model begins at piece `at`; False after the last piece."""
        return stands_at(pieces, at, self._history.assistant_texts) and self._is_header(pieces, at)

    def _end_of(self, pieces: list[TextPiece], start: int, end: int) -> int:
        """Return the piece that ends the turn in [start, end), or `end` if a header ends it."""
        return next((at for at in range(end - 1, start, -1) if self._is_end(pieces, at)), end)

    def _is_end(self, pieces: list[TextPiece], at: int) -> bool:
        return pieces[at].is_added and pieces[at].ids[0] in self._history.ends


def _refuse_uncounted(text: str, context_bytes: int) -> None:
    """Raise if a text is too long to be counted; no prompt that fits the context is too long."""
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
    """Return the words of an assistant message; a template shows at least one of the words."""
    names = [call["function"]["name"] for call in message.get("tool_calls") or ()]
    words = (*(part["text"].strip() for part in parts_of(message)), *names)
    return [word for word in words if word]


def shows_all(message: dict[str, Any], text: str) -> bool:
    """Return whether `text` shows all words of an assistant's message, in their order.

    Thinking comes first and may be missing. The search begins after the thinking, which may name a
    called function.
    """
    thinking = (message.get("reasoning_content") or "").strip()
    position = text.find(thinking) + len(thinking) if thinking in text else 0
    for word in words_of(message):
        position = text.find(word, position)
        if position < 0:
            return False
        position += len(word)
    return True


def shows_other(message: dict[str, Any], other: dict[str, Any], text: str) -> bool:
    """Return whether `text` shows the `other` message, and `message` lacks the same text."""
    other_text = text_of(other).strip()
    return (
        bool(other_text)
        and other_text in text
        and json.dumps(other_text)[1:-1] not in json.dumps(message)
    )


def ends_in(ids: Tokens, ends: Set[int]) -> int:
    """Return how many of a turn's tokens, without the first, are in `ends`."""
    return sum(token in ends for token in ids[1:].tolist())


def end_of_own(
    pieces: list[TextPiece], message: dict[str, Any], ends: Set[int], ids: Tokens
) -> int | None:
    """Return the piece that ends the turn of `message`, or None; the first piece begins the turn.

    It is the first end after all words of the message and after as many ends as the turn's `ids`
    have: Apertus writes an end, then the results, then another end.
    """
    text, inner_ends = pieces[0].text, ends_in(ids, ends)
    for at, piece in enumerate(pieces[1:], 1):
        if piece.is_added and piece.ids[0] in ends:
            if inner_ends <= 0 and shows_all(message, text):
                return at
            inner_ends -= 1
        text += piece.text
    return None


def stands_at(pieces: list[TextPiece], at: int, texts: tuple[str, ...]) -> bool:
    """Return whether one of the texts begins with piece `at`. Texts and pieces are not empty."""
    length = max(map(len, texts), default=0)
    return "".join(piece.text[:length] for piece in pieces[at : at + length]).startswith(texts)


def paired_headers(
    headers: list[tuple[int, int]], messages: list[int]
) -> list[tuple[tuple[int, int], int]]:
    """Pair messages with headers: a single message has all, several have one each or none."""
    if len(messages) == 1:
        return [((headers[0][0], headers[-1][1]), messages[0])]
    return list(zip(headers, messages, strict=True)) if len(headers) == len(messages) else []
