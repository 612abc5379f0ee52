"""Makes turns and lines for a session archive, and archives that hold them."""

import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from hearth.shared.wire_messages import MessageName, Prompt, Speaker, linked
from hearth.worker.cache.block_hash import pack
from hearth.worker.prompt.prompt_with_sampled_turns import PromptPrefix
from hearth.worker.sessions.conversation_lines import Line, shape_of
from hearth.worker.sessions.echoed_turn_match import TurnContent
from hearth.worker.sessions.session_archive import ArchiveEntry, SessionArchive
from hearth.worker.sessions.turn_store import Turn

ME = Speaker("key", "s1", "", "p")


def turn(number: int, size: int = 20, arguments: Any = None) -> Turn:
    """Return a turn that is told from all others by its number."""
    said = TurnContent(
        f"thought {number}", f"answer {number}", (("read", arguments or {"at": number}),)
    )
    return Turn(
        api_key="owner",
        link=number.to_bytes(16, "little"),
        ids=pack([number, *range(size)]),
        answer=said,
        text=f"{said}",
        call_ids=(f"id{number}",),
        signature=f"seal{number}",
        made_at=1_000.0 + number,
        prefix=PromptPrefix(number, 3, b"digest") if number % 2 else None,
    )


def plain(turn: Turn) -> tuple[Any, ...]:
    """Return all that a turn is, as what can be compared."""
    rest = (turn.answer, turn.text, turn.call_ids, turn.signature, turn.made_at, turn.prefix)
    return (turn.api_key, turn.link, turn.ids.tolist(), *rest)


def grown(
    line: Line, said: Sequence[str], tokens: Sequence[int], at: float = 1.0, **more: Any
) -> ArchiveEntry:
    """Have `line` go on to these messages and tokens; return what that leaves.

    What stands behind # in a message is volatile.
    """
    was = (line.shape, line.tokens) if line.turns else None
    names = linked(
        MessageName(text.partition("#")[0].encode(), b"x" + text.encode(), ["rule"])
        for text in said
    )
    prompt = Prompt([{"role": "user", "content": text} for text in said], names=names, **more)
    line.shape, line.tokens = shape_of(prompt), pack(tokens)
    line.turns, line.prompt_tokens = line.turns + 1, len(tokens) - 1
    line.past[line.shape.chain] = (len(said), len(tokens))
    line.rows.append({"turn": line.turns})
    return ArchiveEntry(at, ME, {}, line.copy(), was)


def nothing() -> Iterable[ArchiveEntry]:
    return ()


def saved(directory: Path, entries: Iterable[ArchiveEntry]) -> None:
    """Have `entries` written behind what `directory` holds."""
    archive = SessionArchive(directory, nothing)
    archive.load()
    for entry in entries:
        archive.add(entry)
    archive.journal.close()


def turns_of(memory: Iterable[ArchiveEntry]) -> list[Turn]:
    return [entry.turn for entry in memory if entry.turn is not None]


def lines_of(memory: Iterable[ArchiveEntry]) -> list[ArchiveEntry]:
    return [entry for entry in memory if entry.line is not None]


def loaded(directory: Path) -> tuple[list[ArchiveEntry], dict[str, int]]:
    """Return what `directory` holds, and what was counted when it was read."""
    archive = SessionArchive(directory, nothing)
    memory = archive.load()
    archive.journal.close()
    return memory, archive.report()


def the_file(directory: Path) -> Path:
    (path,) = directory.glob("*.journal")
    return path


def copied(directory: Path, to: Path, octets: bytes) -> Path:
    """Return a copy of `directory` whose one file holds `octets`."""
    shutil.rmtree(to, ignore_errors=True)
    shutil.copytree(directory, to)
    the_file(to).write_bytes(octets)
    return to
