"""Tokenises rendered text: each piece once, and no content as a control token.

A fast tokenizer first cuts a text at the added tokens, then encodes the text between two added
tokens without regard to other text. So pieces can be encoded, and remembered, one by one. This also
separates content from template: before the rendering, each control token that content spells out
gets a mark inside. The marks are removed once the text is cut.
Images are replaced by marks too. So a template gets only texts, and images may be wherever text may
be, also in tools' results.
The prompt threads share this module. Does not touch MLX.
"""

import json
import re
import secrets
import string
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise, takewhile
from operator import is_
from typing import Any, Final

from tokenizers import AddedToken, Tokenizer

from hearth.shared.errors import RequestError
from hearth.shared.memory_by_owner import MemoryByOwner
from hearth.worker.cache.image_keys import PromptImage
from hearth.worker.prompt.awaited_work import raise_if_client_left

REMEMBERED_CHARS_MAX: Final = 64 * 1024 * 1024
PIECE_OVERHEAD_CHARS: Final = 256  # approximate cost of a remembered piece besides its text

MARK_LENGTH: Final = 16  # characters; so long that no client can guess the mark
_NONCHARACTERS: Final = "".join(map(chr, range(0xFDD0, 0xFDF0)))  # not used in interchanged text

# Names of a vocabulary, such as <|fim_prefix|>. HTML tags have no bar and no underscore.
_NAMED_MARK = re.compile(r"<[^<>\s]*[|\uff5c_][^<>\s]*>")
# White space that `lstrip` and `rstrip` of added tokens remove in Rust; Python's \s has more.
_SPACES: Final = "\t\n\v\f\r \x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000" + "".join(
    map(chr, range(0x2000, 0x200B))
)
_SPACE_RUN = re.compile(f"[{_SPACES}]*")
_IN_NO_VOCABULARY = "\ufdd0\U000e0fff\U0010fffd"
_NEVER = re.compile("(?!)")
_IMAGE_SHOWN: Final = "\ufffc"  # Unicode's character for an object in a text
NFC_FACTOR: Final = 3  # normalising to NFC makes at most so many bytes into one
_UNIGRAM_SPACE: Final = "▁"

_PieceKey = tuple[str, bool]  # a text, and whether it begins the prompt


@dataclass(frozen=True, slots=True)
class TextPiece:
    """An added token, the text between two added tokens (without marks), or an image. Immutable."""

    text: str
    ids: tuple[int, ...]
    is_added: bool
    image: PromptImage | None = None


@dataclass(frozen=True, slots=True)
class ImageForm:
    """The text that a model's processor writes around each image. Immutable."""

    before: str = ""
    after: str = ""


class PieceTokeniser:
    """Tokenises rendered prompts of one model.

    `tokenizer` is mlx-lm's TokenizerWrapper or the tokenizer inside; `template` is the source of
    the chat template, or "".

    `mark` shields content. The mark consists of digits unless an added token is a digit, because
    JSON, repr, quotes, markup and letter case in a template leave digits unchanged. The mark stays
    the same while the process runs, so that a growing prompt is always rendered in the same way.

    Content that went through `shielded` yields no control token, wherever the template puts the
    content, and the text stays unchanged. The exception is a control token that arises where the
    template joins or changes strings of content.

    is_incremental: no remembered text is encoded again, and `ids` of a text without marks equals
    `tokenizer.encode(text, add_special_tokens=False)`. The only difference is in characters that
    normalising would turn into a control token: `ids` has no control token for such characters.
    Trials in the constructor find the value. The value is False for a tokenizer that is slow,
    rewrites the text, matches added tokens as single words, or normalises added tokens together
    with the text around. Such a tokenizer encodes each text whole, with exactly its own ids. Only a
    text with marks is encoded in stretches between the marks; a tokenizer that puts a space in
    front of a text then puts a space before each stretch.

    Text is remembered only for the `owner` of the prompt, "" = for everybody.
    The prompt threads share one tokeniser.
    """

    def __init__(
        self, tokenizer: Any, template: str, remembered_chars_max: int = REMEMBERED_CHARS_MAX
    ) -> None:
        self._tokenizer = tokenizer
        self.beginning = _beginning(tokenizer)  # ids that the tokenizer puts before any text
        self.token_bytes_max = longest_token_bytes(tokenizer)
        self.vocab_size = max(tokenizer.get_vocab().values()) + 1  # highest id + 1
        # Kept for one key: token ids of texts, 64 M characters
        self.memory = PieceCache(
            remembered_chars_max, self.vocab_size, lambda: stop_words(tokenizer)
        )
        added: dict[int, AddedToken] = tokenizer.added_tokens_decoder
        self._added = _AddedTokens(added)
        controls = _controls(tokenizer, template)
        self.controls = frozenset(controls.values())
        in_json = (json.dumps(text, ensure_ascii=False)[1:-1] for text in self.controls)
        self._control = _first_character_of({*self.controls, *in_json})
        has_digits = any(
            token.content.isdecimal() for token in added.values()
        )  # such a token would cut marks of digits
        characters = _NONCHARACTERS if has_digits else string.digits
        self.mark = "".join(secrets.choice(characters) for _ in range(MARK_LENGTH))
        backend = getattr(tokenizer, "backend_tokenizer", None)
        self._plain = None if backend is None else PlainTextEncoder(backend, controls)
        self.is_incremental = self._plain is not None  # lets the trial use pieces
        self.is_incremental = self.is_incremental and self._agrees()

    def shielded(self, value: Any) -> Any:
        """Return `value` with the mark inside each control token that its strings spell out.

        This includes control tokens in JSON inside a string, because a template may be given the
        parsed JSON. Strings, lists and dicts (with their keys) are searched. A value that needs no
        mark is returned as the same object.
        """
        # Loops need one frame per level, which suffices for the deepest JSON that the wire allows.
        if isinstance(value, str):
            shown, count = self._control.subn(lambda hit: hit[0] + self.mark, value)
            return shown if count else value
        if isinstance(value, dict):
            items = {}
            for key, item in value.items():
                items[self.shielded(key)] = self.shielded(item)
            is_same = all(map(is_, chain(items, items.values()), chain(value, value.values())))
            return value if is_same else items
        if isinstance(value, list):
            elements = []
            for item in value:
                elements.append(self.shielded(item))
            return value if all(map(is_, elements, value)) else elements
        return value

    def kept_apart(self, message: dict[str, Any]) -> dict[str, Any]:
        """Return the message; if the text parts join to a control token, each part gets a mark.

        The mark is at the part's end. A template may strip and join the parts.
        """
        parts = message.get("content")
        texts = [part["text"] for part in parts] if isinstance(parts, list) else []
        if self.shielded(joined := "".join(map(str.strip, texts))) is joined:
            return message
        # Blank texts get no mark, because a template may leave out blank texts.
        ended = [
            text.rstrip() + self.mark * bool(text.strip()) + text[len(text.rstrip()) :]
            for text in texts
        ]
        return {**message, "content": [{"type": "text", "text": text} for text in ended]}

    def ids(self, text: str, owner: str = "") -> list[int]:
        """Return the token ids of a rendered text, without ids that a tokenizer would add."""
        return [token for piece in self.pieces(text, owner=owner) for token in piece.ids]

    def unremembered_ids(self, text: str) -> list[int]:
        """Return the token ids of a text as `ids` does, and remember nothing."""
        if self._plain is None:
            return list(self._tokenizer.encode(text, add_special_tokens=False))
        return self._plain.ids(text, False)

    def pieces(self, text: str, is_first: bool = True, owner: str = "") -> list[TextPiece]:
        """Return the rendered text, cut at the added tokens, without marks.

        `is_first`: the text begins the prompt. White space that an added token swallows belongs to
        that token. If is_incremental is False and the ids do not show the cuts, the text is one
        piece.
        """
        if not self.is_incremental:
            segments = filter(None, text.split(self.mark))
            return [piece for segment in segments for piece in self._whole(segment, owner)]
        between, added = self._added.split(text)
        contents = [content.replace(self.mark, "") for content in between]
        runs = [
            self._plain_ids(content, is_first and number == 0, owner) if content else ()
            for number, content in enumerate(contents)
        ]
        return _interleaved(contents, runs, added)

    def text_ids(self, text: str, is_first: bool, owner: str) -> tuple[int, ...]:
        """Return the ids of one piece's text; none if the tokenizer has no pieces."""
        return self._plain_ids(text, is_first, owner) if self.is_incremental else ()

    def _plain_ids(self, content: str, is_first: bool, owner: str) -> tuple[int, ...]:
        assert self._plain is not None and content
        raise_if_client_left()
        encode = self._plain.ids
        return self.memory.recall(owner, (content, is_first), lambda: encode(content, is_first))

    def _whole(self, text: str, owner: str) -> list[TextPiece]:
        """Return the pieces of a text that is encoded whole."""
        encode = self._tokenizer.encode
        ids = self.memory.recall(
            owner, (text, True), lambda: encode(text, add_special_tokens=False)
        )
        between, added = self._added.split(text)
        positions = [
            position for position, token_id in enumerate(ids) if token_id in self._added.all_ids
        ]
        if [ids[position] for position in positions] != [piece.ids[0] for piece in added]:
            return [TextPiece(text, ids, is_added=False)]
        starts, stops = [0, *(position + 1 for position in positions)], [*positions, len(ids)]
        runs = [ids[start:stop] for start, stop in zip(starts, stops, strict=True)]
        return _interleaved(between, runs, added)

    def _agrees(self) -> bool:
        """Return whether pieces and whole texts give the same ids, for critical texts."""
        literals = [token.content for token in self._tokenizer.added_tokens_decoder.values()]
        around = [
            f"word{x}word {x} Wörter 12{x}345\n{x}\n\n  {x}\t{x}{x}日本 e{x}\u0301 {x.swapcase()}"
            for x in literals
        ]
        probes = ["", " ", "two words ", " \n \U0001f98a 3.14", "".join(around)]
        probes += [
            start + x + end for x in self.controls for start, end in (("", "word"), ("\n", " 1"))
        ]
        agrees = all(
            self.ids(probe) == self._tokenizer.encode(probe, add_special_tokens=False)
            for probe in probes
        )
        self.memory.clear()
        return agrees


class _AddedTokens:
    """Finds added tokens as a fast tokenizer does: leftmost first, and the longest of several.

    Source: `find_matches` in huggingface/tokenizers, added_vocabulary.rs.
    """

    def __init__(self, added: dict[int, AddedToken]) -> None:
        self.all_ids = frozenset(added)
        self._ids = {token.content: token_id for token_id, token in added.items()}
        self._left = frozenset(token.content for token in added.values() if token.lstrip)
        self._right = frozenset(token.content for token in added.values() if token.rstrip)
        pattern = _longest({literal for literal in self._ids if literal})
        self._literal = re.compile(pattern) if pattern else _NEVER  # finds the longest of several

    def split(self, text: str) -> tuple[list[str], list[TextPiece]]:
        """Return the texts between added tokens (one more than tokens), and the token pieces."""
        between = []
        added = []
        end = 0
        for match in self._literal.finditer(text):
            literal = match[0]
            start, stop = match.span()
            if literal in self._left:
                start = end + len(text[end:start].rstrip(_SPACES))
            if literal in self._right:
                stop = next(_SPACE_RUN.finditer(text, stop)).end()
            between.append(text[end:start])
            added.append(TextPiece(text[start:stop], (self._ids[literal],), is_added=True))
            end = stop  # may move back, if an earlier token swallowed a white-space token
        between.append(text[end:])
        return between, added


class PlainTextEncoder:
    """Encodes text with a tokenizer's own vocabulary and none of its added tokens.

    The model is the tokenizer's own, not a copy. Text that does not begin a prompt is encoded
    after an anchor, which is an added token that no text can contain. A tokenizer that puts a space
    in front of a text treats the anchor like its own added tokens. Any prompt thread may use this
    encoder.
    """

    def __init__(self, backend: Tokenizer, controls: dict[int, str]) -> None:
        self._controls = controls
        self._encoder = Tokenizer(backend.model)
        if backend.normalizer is not None:
            self._encoder.normalizer = backend.normalizer
        if backend.pre_tokenizer is not None:
            self._encoder.pre_tokenizer = backend.pre_tokenizer
        self._anchor = f"<{secrets.token_hex(16)}>"
        self._encoder.add_special_tokens([AddedToken(self._anchor, normalized=False)])
        self._anchor_id = self._encoder.token_to_id(self._anchor)
        unknown = self._encoder.encode(_IN_NO_VOCABULARY, add_special_tokens=False)
        self._unknown_ids = controls.keys() & set(unknown.ids)

    def ids(self, text: str, is_first: bool) -> list[int]:
        """Return the token ids, without control tokens except the id of unknown characters."""
        anchor = "" if is_first else self._anchor
        try:
            (encoding,) = self._encoder.encode_batch_fast([anchor + text], add_special_tokens=False)
        except TypeError as error:  # raised for half of a surrogate pair, which UTF-8 lacks
            raise RequestError("The prompt has a text that is no Unicode.") from error
        assert is_first or encoding.ids[0] == self._anchor_id, "the anchor became several tokens"
        ids: list[int] = encoding.ids if is_first else encoding.ids[1:]
        if self._controls.keys().isdisjoint(ids):
            return ids
        parts = self._parts(text, anchor)
        if len(parts) == 1:
            return ids
        return [
            token_id
            for number, part in enumerate(parts)
            for token_id in self.ids(part, is_first and number == 0)
        ]

    def _parts(self, text: str, anchor: str) -> list[str]:
        """Return the text cut in the middle of each control token of the vocabulary."""
        encoding = self._encoder.encode(anchor + text, add_special_tokens=False)
        positions: list[int] = []
        for token_id, (start, stop) in zip(encoding.ids, encoding.offsets, strict=True):
            start, stop = start - len(anchor), stop - len(anchor)
            if start < 0 or token_id not in self._controls:
                continue
            if token_id in self._unknown_ids:  # mostly the id of unknown characters
                literal = self._controls[token_id]
                found = re.finditer(re.escape(literal), text[start:stop])
                positions += [start + match.start() + len(literal) // 2 for match in found]
            elif stop - start >= 2:
                positions.append((start + stop) // 2)
        return [text[a:b] for a, b in zip([0, *positions], [*positions, len(text)], strict=True)]


class PieceCache(MemoryByOwner[_PieceKey, tuple[int, ...]]):
    """The ids of texts by owner, limited in characters; a text counts PIECE_OVERHEAD_CHARS more.

    A tokenizer's own memory of words would serve everybody. So the tokenizer stops remembering
    words once the first text with an owner is encoded. The prompt threads share this cache.
    """

    def __init__(
        self, chars_max: int, vocab_size: int, stop_words: Callable[[], None] = lambda: None
    ) -> None:
        """Take the size, and `stop_words`, which stops the tokenizer's own memory of words."""
        super().__init__(chars_max, lambda key, _: len(key[0]) + PIECE_OVERHEAD_CHARS)
        # One shared object per id, so a token takes 8 bytes.
        self._int_of = list(range(vocab_size)).__getitem__
        self._stop_words = stop_words
        self._has_words = True

    def recall(
        self, owner: str, key: _PieceKey, encode: Callable[[], list[int]]
    ) -> tuple[int, ...]:
        """Return the ids of (text, whether it begins the prompt), encoded if not known."""
        known = self.get(owner, key)
        if known is not None:
            return known
        if owner and self._has_words:  # two threads may both do this
            self._stop_words()
            self._has_words = False
        ids = tuple(map(self._int_of, encode()))
        self.put(owner, key, ids)
        return ids


def stop_words(tokenizer: Any) -> None:
    """Make the tokenizer's model forget all split words, and remember none from now on.

    Models that split each word anew remember no words, and neither do slow tokenizers of
    language models.
    """
    model = getattr(getattr(tokenizer, "backend_tokenizer", None), "model", None)
    if model is not None and hasattr(model, "_clear_cache"):
        model._clear_cache()
        model._resize_cache(0)
        model._clear_cache()  # words that another thread has split meanwhile


def _interleaved(
    contents: list[str], runs: list[tuple[int, ...]], added: list[TextPiece]
) -> list[TextPiece]:
    """Return content, added token, content, and so on, without empty contents."""
    pieces = []
    for content, run, token in zip(contents, runs, [*added, None], strict=True):
        if content or run:
            pieces.append(TextPiece(content, run, is_added=False))
        if token is not None:
            pieces.append(token)
    return pieces


def _controls(tokenizer: Any, template: str) -> dict[int, str]:
    """Return the added tokens that only a template may make.

    Control tokens are the special tokens, the tokens that the template names, and names in angle
    brackets with a bar or an underscore, such as `<|fim_prefix|>`. Other added tokens are text,
    such as blanks and HTML tags. A control token of a single character is left out, because there
    is no room for a mark inside.
    """
    special = frozenset(tokenizer.all_special_tokens)
    kinds = ("think_start", "think_end", "tool_call_start", "tool_call_end")
    names = [getattr(tokenizer, kind, None) or "" for kind in kinds]
    listed = getattr(tokenizer, "chat_control_tokens", None) or ()
    named = "\0".join([template, *names, *listed])
    return {
        token_id: token.content
        for token_id, token in tokenizer.added_tokens_decoder.items()
        if len(token.content) > 1
        and (
            token.special
            or token.content in special
            or (token.content in named and not token.content.isspace())
            or _NAMED_MARK.fullmatch(token.content)
        )
    }


def _beginning(tokenizer: Any) -> list[int]:
    """Return the ids, mostly one, that the tokenizer itself puts in front of any text."""
    bare, whole = tokenizer.encode("a", add_special_tokens=False), tokenizer.encode("a")
    positions = (at for at in range(len(whole)) if whole[at : at + len(bare)] == bare)
    return list(whole[: next(positions, 0)])


def _first_character_of(literals: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern for the first character of each literal, overlapping literals included."""
    rests: dict[str, set[str]] = {}
    for literal in literals:
        rests.setdefault(literal[0], set()).add(literal[1:])
    found = [f"{re.escape(first)}(?={_longest(rests[first])})" for first in sorted(rests)]
    return re.compile("|".join(found)) if found else _NEVER


def _longest(literals: set[str]) -> str:
    """Return a regular expression for the longest literal; shared parts are tested once."""
    if not literals:
        return ""
    pairs = zip(min(literals), max(literals), strict=False)
    shared = "".join(letter for letter, _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    rests: dict[str, set[str]] = {}
    for literal in literals:
        if rest := literal[len(shared) :]:
            rests.setdefault(rest[0], set()).add(rest)
    if not rests:
        return re.escape(shared)
    branches = "|".join(_longest(rests[first]) for first in sorted(rests))
    return f"{re.escape(shared)}(?:{branches}){'?' if shared in literals else ''}"


# ---------------------------------------------------------------- images


def marked(messages: list[dict[str, Any]], mark: str) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the messages with texts for content, and the digests of the messages' images.

    An image's mark and the texts beside the image become one text; two neighbouring texts stay two.

    The given texts have `mark` only to shield control tokens, and never twice in a row.
    """
    assert mark, "an empty mark cannot show the places of images"
    digests: list[str] = []
    shown = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, list):
            texts = [_text_of_part(part, mark, digests) for part in content[:1]]
            for before, part in pairwise(content):
                text = _text_of_part(part, mark, digests)
                is_apart = before["type"] == part["type"] == "text"
                texts += [text] if is_apart else [texts.pop() + text]
            parts = [{"type": "text", "text": text} for text in texts]
            message = {**message, "content": parts if len(parts) > 1 else "".join(texts)}
        shown.append(message)
    return shown, digests


def _text_of_part(part: dict[str, Any], mark: str, digests: list[str]) -> str:
    if part["type"] == "text":
        return str(part["text"])
    digests.append(part["image"])
    return f"{mark}{mark}{len(digests) - 1}{mark}{mark}"


def pieces_of(
    tokeniser: PieceTokeniser,
    text: str,
    images: Sequence[PromptImage],
    form: ImageForm,
    owner: str = "",
) -> list[TextPiece]:
    """Return a rendered text as pieces, with `images` in place of the images' marks.

    Raises:
        RequestError: the template has left out a message with an image.
    """
    if not images:
        return tokeniser.pieces(text, owner=owner)
    twice = re.escape(tokeniser.mark * 2)
    parts = re.split(f"{twice}([0-9]{{1,9}}?){twice}", text)
    if missing := set(range(len(images))) - {int(number) for number in parts[1::2]}:
        raise RequestError(
            f"The model's chat template leaves out {len(missing)} of the {len(images)} images in "
            "these messages. Send them in messages of the user.",
            param="messages",
        )
    pieces: list[TextPiece] = []
    for at, part in enumerate(parts):
        if at % 2:
            image = images[int(part)]
            pieces.append(TextPiece(_IMAGE_SHOWN, image.ids, is_added=False, image=image))
            continue
        before = form.after if at else ""
        after = form.before if at < len(parts) - 1 else ""
        text = f"{before}{part}{after}"
        pieces += tokeniser.pieces(text, is_first=at == 0, owner=owner)
    return pieces


# ---------------------------------------------------------------- the longest token


def longest_token_bytes(tokenizer: Any) -> int | None:
    """Return the most bytes of UTF-8 text that one token of `tokenizer` can encode.

    None if there is no limit: an added token may swallow all white space around, an unknown token
    may replace any run of characters, a step before the vocabulary may drop text, and a slow
    tokenizer is not inspected.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return None
    splits = _parts(backend.pre_tokenizer, "pretokenizers")
    is_byte_level = any(part["type"] == "ByteLevel" for part in splits)
    added = tokenizer.added_tokens_decoder.values()
    takes_blanks = any(token.lstrip or token.rstrip for token in added)
    has_bytes = is_byte_level or getattr(backend.model, "byte_fallback", False)
    if takes_blanks or any(map(_drops_text, splits)) or not has_bytes:
        return None
    factor = _shrink_factor(_parts(backend.normalizer, "normalizers"))
    if factor is None:
        return None
    literal = {token.content for token in added}
    longest = max(
        len(text) if is_byte_level and text not in literal else len(text.encode())
        for text in tokenizer.get_vocab()
    )
    return factor * longest


def _drops_text(split: dict[str, Any]) -> bool:
    """Return whether a pre-tokeniser may drop text when splitting."""
    kind = split["type"]
    is_removed = kind == "Split" and split["behavior"] == "Removed"
    return is_removed or kind not in ("Split", "ByteLevel", "Digits", "Metaspace")


def _shrink_factor(normalizers: list[dict[str, Any]]) -> int | None:
    """Return by which factor normalising may shorten a text at most; None = no limit."""
    factor = 1
    for part in normalizers:
        if part["type"] == "NFC":
            factor *= NFC_FACTOR
        elif part["type"] == "Replace":
            if part["pattern"] != {"String": " "} or part["content"] != _UNIGRAM_SPACE:
                return None
        elif part["type"] != "Prepend":
            return None
    return factor


def _parts(stage: Any, inner: str) -> list[dict[str, Any]]:
    """Return the steps of a normaliser or a pre-tokeniser, in the form of its JSON."""
    if stage is None:
        return []
    shape: dict[str, Any] = json.loads(stage.__getstate__())
    parts: list[dict[str, Any]] = shape[inner] if shape["type"] == "Sequence" else [shape]
    return parts
