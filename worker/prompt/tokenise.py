"""Tokenises rendered text: each piece once, and none of the content as a control token.

A fast tokenizer cuts a text at its added tokens before anything else, and what stands between two
of them it encodes without looking beyond. So the pieces can be encoded, and remembered, one by
one. That also keeps content apart from template: content is shielded before the template sees it,
by a mark inside each control token that it spells out, and the marks go when the cuts are made.
Marks stand where images stand, too: a template is given texts only, so that it shows images
wherever it shows text, in tools' results too.
The prompt threads share it. Touches no MLX.
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
from hearth.worker.prompt.awaited_work import stop_unless_awaited

REMEMBERED_CHARS_MAX: Final = 64 * 1024 * 1024
PIECE_OVERHEAD_CHARS: Final = 256  # what remembering a piece costs beside its text, about

MARK_LENGTH: Final = 16  # characters: no text has the mark by chance, and nobody can foresee it
_NONCHARACTERS: Final = "".join(map(chr, range(0xFDD0, 0xFDF0)))  # in no text that is interchanged

# A name of the vocabulary's own, such as <|fim_prefix|>: no tag of HTML has a bar or an underscore.
_NAMED_MARK = re.compile(r"<[^<>\s]*[|\uff5c_][^<>\s]*>")
# What Rust calls white space, as `lstrip` and `rstrip` of an added token do; Python's \s has more.
_SPACES: Final = "\t\n\v\f\r \x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000" + "".join(
    map(chr, range(0x2000, 0x200B))
)
_SPACE_RUN = re.compile(f"[{_SPACES}]*")
_IN_NO_VOCABULARY = "\ufdd0\U000e0fff\U0010fffd"
_NEVER = re.compile("(?!)")
_IMAGE_SHOWN: Final = "\ufffc"  # what Unicode has for an object in a text
NFC_FACTOR: Final = 3  # bytes that normalising to NFC makes one of, at most
_UNIGRAM_SPACE: Final = "▁"

_PieceKey = tuple[str, bool]  # a text, and whether it is a prompt's first


@dataclass(frozen=True, slots=True)
class TextPiece:
    """One added token, or the text between two, without marks; or an image. Immutable."""

    text: str
    ids: tuple[int, ...]
    is_added: bool
    picture: PromptImage | None = None


@dataclass(frozen=True, slots=True)
class ImageForm:
    """The text that a model's processor writes around each image. Immutable."""

    before: str = ""
    after: str = ""


class PieceTokeniser:
    """Tokenises rendered prompts of one model.

    `tokenizer` is mlx-lm's TokenizerWrapper or the tokenizer in it, `template` the source of its
    chat template, "" where it has none.

    `mark` shields content. It is of digits, where none is an added token: a template's JSON, repr,
    quotes, markup and letter case leave them as they are. It stays the same while the process runs,
    so that a prompt that grows is written alike.

    Content that went through `shielded` yields no control token, wherever the template puts it,
    and reads as it was written. A control token that comes about where the template joins two
    strings of content, or changes them, cannot be foreseen.

    is_incremental: nothing that is remembered is encoded again, and `ids` of a text without marks
    is what `tokenizer.encode(text, add_special_tokens=False)` gives, but for other characters that
    normalising would turn into a control token: here they yield none. Found by trying at
    construction, and False for a tokenizer that is slow, rewrites the text, matches added tokens as
    single words, or normalises them together with what is around them. Such a one encodes each text
    whole, with exactly its own ids; only where there are marks it encodes the stretches between
    them, so that one that puts a space in front of a text puts one there too.

    What is remembered of a text serves the `owner` alone that it was encoded for, "" = everybody.
    The prompt threads share it.
    """

    def __init__(
        self, tokenizer: Any, template: str, remembered_chars_max: int = REMEMBERED_CHARS_MAX
    ) -> None:
        self._tokenizer = tokenizer
        self.beginning = _beginning(tokenizer)  # what it has any text begin with
        self.token_bytes_max = longest_token_bytes(tokenizer)
        self.vocab_size = max(tokenizer.get_vocab().values()) + 1  # one more than the highest id
        # Kept for one key: token ids of texts, 64 M characters
        self.memory = PieceCache(
            remembered_chars_max, self.vocab_size, lambda: stop_words(tokenizer)
        )
        added: dict[int, AddedToken] = tokenizer.added_tokens_decoder
        self._added = _AddedTokens(added)
        controls = _controls(tokenizer, template)
        self.controls = frozenset(controls.values())
        in_json = (json.dumps(each, ensure_ascii=False)[1:-1] for each in self.controls)
        self._control = _first_character_of({*self.controls, *in_json})
        has_digits = any(token.content.isdecimal() for token in added.values())  # cut in any mark
        characters = _NONCHARACTERS if has_digits else string.digits
        self.mark = "".join(secrets.choice(characters) for _ in range(MARK_LENGTH))
        backend = getattr(tokenizer, "backend_tokenizer", None)
        self._plain = None if backend is None else PlainTextEncoder(backend, controls)
        self.is_incremental = self._plain is not None  # so that the trial goes by pieces
        self.is_incremental = self.is_incremental and self._agrees()

    def shielded(self, value: Any) -> Any:
        """Return `value` with the mark inside each control token that its strings spell out.

        A control token that JSON in a string spells has it too: a template may be given what that
        JSON holds.
        Strings, lists and dicts (keys too) are gone through; what needs no mark is returned as it
        is.
        """
        # Loops, not comprehensions: one frame a level, as deep as the wire lets JSON be nested.
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
        """Return the message, its text parts with marks at their ends if they join to a control.

        A template may join them, and strip each.
        """
        parts = message.get("content")
        texts = [part["text"] for part in parts] if isinstance(parts, list) else []
        if self.shielded(joined := "".join(map(str.strip, texts))) is joined:
            return message
        # Blanks stay: a template may leave out a text of nothing else.
        ended = [
            text.rstrip() + self.mark * bool(text.strip()) + text[len(text.rstrip()) :]
            for text in texts
        ]
        return {**message, "content": [{"type": "text", "text": text} for text in ended]}

    def ids(self, text: str, owner: str = "") -> list[int]:
        """Return the token ids of a rendered text, without any that only a tokenizer adds."""
        return [token for piece in self.pieces(text, owner=owner) for token in piece.ids]

    def unremembered_ids(self, text: str) -> list[int]:
        """Return the token ids of a text as `ids` would, and remember nothing of it."""
        if self._plain is None:
            return list(self._tokenizer.encode(text, add_special_tokens=False))
        return self._plain.ids(text, False)

    def pieces(self, text: str, is_first: bool = True, owner: str = "") -> list[TextPiece]:
        """Return the rendered text cut at its added tokens, without what shielded its content.

        `is_first`: nothing of the prompt stands before it. The white space that an added token
        swallows belongs to it. Where is_incremental is False and the cuts of the text do not show
        in the ids, what should be several pieces is one.
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
        """Return the ids of one piece's text; none where the tokenizer has no pieces."""
        return self._plain_ids(text, is_first, owner) if self.is_incremental else ()

    def _plain_ids(self, content: str, is_first: bool, owner: str) -> tuple[int, ...]:
        assert self._plain is not None and content
        stop_unless_awaited()
        encode = self._plain.ids
        return self.memory.recall(owner, (content, is_first), lambda: encode(content, is_first))

    def _whole(self, text: str, owner: str) -> list[TextPiece]:
        """Return the pieces of a text that is encoded whole."""
        encode = self._tokenizer.encode
        ids = self.memory.recall(
            owner, (text, True), lambda: encode(text, add_special_tokens=False)
        )
        between, added = self._added.split(text)
        places = [place for place, token_id in enumerate(ids) if token_id in self._added.all_ids]
        if [ids[place] for place in places] != [piece.ids[0] for piece in added]:
            return [TextPiece(text, ids, is_added=False)]
        starts, stops = [0, *(place + 1 for place in places)], [*places, len(ids)]
        runs = [ids[start:stop] for start, stop in zip(starts, stops, strict=True)]
        return _interleaved(between, runs, added)

    def _agrees(self) -> bool:
        """Return whether pieces give what the whole gives, for texts that might differ."""
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
    """Finds added tokens as a fast tokenizer does: leftmost first, the longest of several.

    Source: `find_matches` in huggingface/tokenizers, added_vocabulary.rs.
    """

    def __init__(self, added: dict[int, AddedToken]) -> None:
        self.all_ids = frozenset(added)
        self._ids = {token.content: token_id for token_id, token in added.items()}
        self._left = frozenset(token.content for token in added.values() if token.lstrip)
        self._right = frozenset(token.content for token in added.values() if token.rstrip)
        any_of_them = _longest({literal for literal in self._ids if literal})
        self._literal = re.compile(any_of_them) if any_of_them else _NEVER  # the longest of several

    def split(self, text: str) -> tuple[list[str], list[TextPiece]]:
        """Return what stands between the added tokens, one more than they are, and those."""
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
            end = stop  # maybe less than it was: a token of white space that another swallowed
        between.append(text[end:])
        return between, added


class PlainTextEncoder:
    """Encodes text with a tokenizer's own vocabulary and none of its added tokens.

    The model is the tokenizer's and not a copy. Text that is not the first of a prompt is encoded
    behind an anchor, an added token that no text can hold, for which a tokenizer that puts a space
    in front of a text does what it does behind its own added tokens. Any prompt thread.
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
        """Return the token ids, none of them a control token's but for what is unknown."""
        anchor = "" if is_first else self._anchor
        try:
            (encoding,) = self._encoder.encode_batch_fast([anchor + text], add_special_tokens=False)
        except TypeError as error:  # it says so of half a character, which UTF-8 does not have
            raise RequestError("The prompt has a text that is no Unicode.") from error
        assert is_first or encoding.ids[0] == self._anchor_id, "the anchor is one token"
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
        """Return the text cut in the middle of what the vocabulary has as a control token."""
        encoding = self._encoder.encode(anchor + text, add_special_tokens=False)
        places: list[int] = []
        for token_id, (start, stop) in zip(encoding.ids, encoding.offsets, strict=True):
            start, stop = start - len(anchor), stop - len(anchor)
            if start < 0 or token_id not in self._controls:
                continue
            if token_id in self._unknown_ids:  # most often it stands for characters unknown
                literal = self._controls[token_id]
                found = re.finditer(re.escape(literal), text[start:stop])
                places += [start + match.start() + len(literal) // 2 for match in found]
            elif stop - start >= 2:
                places.append((start + stop) // 2)
        return [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]


class PieceCache(MemoryByOwner[_PieceKey, tuple[int, ...]]):
    """The ids of texts by their owner, up to a number of characters and PIECE_OVERHEAD_CHARS each.

    The words that a tokenizer remembers of its own accord would serve everybody: it remembers none
    any more from the first text on that is one owner's. The prompt threads share this.
    """

    def __init__(
        self, chars_max: int, vocab_size: int, stop_words: Callable[[], None] = lambda: None
    ) -> None:
        """`stop_words` has the tokenizer itself remember nothing, from now on."""
        super().__init__(chars_max, lambda key, _: len(key[0]) + PIECE_OVERHEAD_CHARS)
        self._int_of = list(range(vocab_size)).__getitem__  # one object an id: 8 bytes a token
        self._stop_words = stop_words
        self._has_words = True

    def recall(
        self, owner: str, key: _PieceKey, encode: Callable[[], list[int]]
    ) -> tuple[int, ...]:
        """Return the ids of (text, whether it is a prompt's first), encoded if need be."""
        known = self.get(owner, key)
        if known is not None:
            return known
        if owner and self._has_words:  # two threads may stop them both
            self._stop_words()
            self._has_words = False
        ids = tuple(map(self._int_of, encode()))
        self.put(owner, key, ids)
        return ids


def stop_words(tokenizer: Any) -> None:
    """Have the tokenizer's model remember none of the words that it has split, nor any later one.

    Models of fast tokenizers that split each word anew remember none, nor do slow tokenizers of
    language models.
    """
    model = getattr(getattr(tokenizer, "backend_tokenizer", None), "model", None)
    if model is not None and hasattr(model, "_clear_cache"):
        model._clear_cache()
        model._resize_cache(0)
        model._clear_cache()  # of what another thread has split meanwhile


def _interleaved(
    contents: list[str], runs: list[tuple[int, ...]], added: list[TextPiece]
) -> list[TextPiece]:
    """Return content, added token, content ..., without contents that are nothing at all."""
    pieces = []
    for content, run, token in zip(contents, runs, [*added, None], strict=True):
        if content or run:
            pieces.append(TextPiece(content, run, is_added=False))
        if token is not None:
            pieces.append(token)
    return pieces


def _controls(tokenizer: Any, template: str) -> dict[int, str]:
    """Return the added tokens that only a template may make.

    They are the special ones, those that it names, and names in angle brackets with a bar or an
    underscore, such as `<|fim_prefix|>`. Others are words: blanks, tags of HTML. One of a single
    character has no inside for a mark, and is left out.
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
    """Return what the tokenizer puts in front of any text by itself, most often one token."""
    bare, whole = tokenizer.encode("a", add_special_tokens=False), tokenizer.encode("a")
    places = (at for at in range(len(whole)) if whole[at : at + len(bare)] == bare)
    return list(whole[: next(places, 0)])


def _first_character_of(literals: Iterable[str]) -> re.Pattern[str]:
    """Return the pattern that finds the first character of each literal, overlapping ones too."""
    rests: dict[str, set[str]] = {}
    for literal in literals:
        rests.setdefault(literal[0], set()).add(literal[1:])
    found = [f"{re.escape(first)}(?={_longest(rests[first])})" for first in sorted(rests)]
    return re.compile("|".join(found)) if found else _NEVER


def _longest(literals: set[str]) -> str:
    """Return a regular expression that is a tree: what literals share is looked at once."""
    if not literals:
        return ""
    pairs = zip(min(literals), max(literals), strict=False)
    shared = "".join(one for one, _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
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
    """Return the messages with texts for content, and the digests of the images in them.

    The mark of an image is one text with the texts beside it; two texts side by side stay two.

    `mark` is in none of them but for what shields their control tokens, which never puts two
    together.
    """
    assert mark, "only a mark shows where an image stands"
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
    pictures: Sequence[PromptImage],
    form: ImageForm,
    owner: str = "",
) -> list[TextPiece]:
    """Return a rendered text as pieces, `pictures` in the places of their marks.

    Raises:
        RequestError: the template has left out a message with an image.
    """
    if not pictures:
        return tokeniser.pieces(text, owner=owner)
    twice = re.escape(tokeniser.mark * 2)
    parts = re.split(f"{twice}([0-9]{{1,9}}?){twice}", text)
    if missing := set(range(len(pictures))) - {int(number) for number in parts[1::2]}:
        raise RequestError(
            f"The model's chat template leaves out {len(missing)} of the {len(pictures)} images in "
            "these messages. Send them in messages of the user.",
            param="messages",
        )
    pieces: list[TextPiece] = []
    for at, part in enumerate(parts):
        if at % 2:
            picture = pictures[int(part)]
            pieces.append(TextPiece(_IMAGE_SHOWN, picture.ids, is_added=False, picture=picture))
            continue
        before = form.after if at else ""
        after = form.before if at < len(parts) - 1 else ""
        text = f"{before}{part}{after}"
        pieces += tokeniser.pieces(text, is_first=at == 0, owner=owner)
    return pieces


# ---------------------------------------------------------------- the longest token


def longest_token_bytes(tokenizer: Any) -> int | None:
    """Return the most bytes of text, in UTF-8, that a token of `tokenizer` can stand for.

    None where there is no such limit: an added token may take all white space beside it, one
    unknown token any run of characters, what comes before the vocabulary may drop text, and of a
    slow tokenizer nothing is known.
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
    """Whether a pre-tokeniser may leave out what it splits at."""
    kind = split["type"]
    is_removed = kind == "Split" and split["behavior"] == "Removed"
    return is_removed or kind not in ("Split", "ByteLevel", "Digits", "Metaspace")


def _shrink_factor(normalizers: list[dict[str, Any]]) -> int | None:
    """Return how many times shorter normalising makes a text at most; None = any number."""
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
    """Return what a normaliser or a pre-tokeniser is made of, as its JSON has it."""
    if stage is None:
        return []
    shape: dict[str, Any] = json.loads(stage.__getstate__())
    parts: list[dict[str, Any]] = shape[inner] if shape["type"] == "Sequence" else [shape]
    return parts
