"""Reads answers that real models gave, with what their conversations held before them.

The file was cut from public repositories; the README beside it names them, their commits and
licences. Nothing here knows a tokenizer.
"""

import hashlib
import json
import lzma
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from hearth.shared.settings_from_env import PROJECT_DIR

DATA: Final = PROJECT_DIR / "tests" / "data" / "recorded_answers" / "answers.json.xz"
DIGEST: Final = "016aabd0bb5d35751efa5305b27cb206f9aa698c64c9afc46166ecde223b9d4c"
KINDS: Final = ("thought", "command", "edit", "prose", "call")

# A text of a conversation in the pieces in which it is tokenised: an answer's parts are apart.
Piece = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Part:
    """A run of an answer's text of one kind: one of KINDS."""

    kind: str
    text: str


@dataclass(frozen=True, slots=True)
class RecordedAnswer:
    """One answer, and all that its conversation held before it. Immutable."""

    prompt: tuple[Piece, ...]
    parts: tuple[Part, ...]
    tools: tuple[dict[str, Any], ...] = ()  # as chat completions describe them


@dataclass(frozen=True, slots=True)
class RecordedSession:
    """The answers of one conversation, or of one captured agent, in order."""

    name: str
    answers: tuple[RecordedAnswer, ...]


def load(path: Path = DATA) -> dict[str, list[RecordedSession]]:
    """Return the sessions of each set of the file."""
    sets = json.loads(lzma.decompress(path.read_bytes()))
    return {
        name: [RecordedSession(row["name"], tuple(_answers(row["turns"]))) for row in sessions]
        for name, sessions in sets.items()
    }


def call_text(name: str, arguments: Any) -> str:
    """Return a call as models of the Hermes and Qwen families write it."""
    call = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{call}\n</tool_call>"


def digest(path: Path = DATA) -> str:
    """Return the SHA-256 of the file's JSON: another xz may pack the same otherwise."""
    return hashlib.sha256(lzma.decompress(path.read_bytes())).hexdigest()


def _answers(turns: list[dict[str, Any]]) -> Iterator[RecordedAnswer]:
    said: tuple[Piece, ...] = ()
    for turn in turns:
        said += tuple((text,) for text in turn["context"])
        parts = tuple(Part(kind, text) for kind, text in turn["answer"])
        yield RecordedAnswer(said, parts)
        said += (tuple(part.text for part in parts),)
