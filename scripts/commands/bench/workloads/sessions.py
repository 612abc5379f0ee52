"""Loads the captured agent sessions that workloads play, cut to a scale and salted.

Their words are pseudo-words of the captured ones' lengths: they may be shipped.
"""

import copy
import hashlib
import secrets
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Final

from hearth.commands.bench.workload import Scale, Visit
from hearth.commands.replay.shortened_sessions import shortened
from hearth.commands.replay.traces import Body, Captured, load_trace

SESSIONS_DIR: Final = Path(__file__).resolve().parent / "captured"
SALT_HEX: Final = 16
_CLIENT_HEADER: Final = "x-anthropic-billing-header:"  # of Claude Code; it changes all the time
_SALT: Final = "salt"  # of `Visit.kept`: what a server by URL has not seen in an earlier run


def session(name: str, visit: Visit, workload: str) -> list[Captured]:
    """Return a session of SESSIONS_DIR as `workload` plays it: the same in the whole visit."""
    return salted(cut(loaded(name), visit.scale), salt(visit, workload))


@cache
def loaded(name: str) -> tuple[Captured, ...]:
    """Return a whole session. Nobody may change its bodies."""
    return tuple(load_trace(SESSIONS_DIR / f"{name}.jsonl.xz"))


def cut(rows: Sequence[Captured], scale: Scale) -> list[Captured]:
    """Return the first requests that a scale allows, their texts as short as it wants them."""
    rows = rows[: scale.requests_max] if scale.requests_max else rows
    return shortened(rows, scale.text_chars_max) if scale.text_chars_max else list(rows)


def salt(visit: Visit, workload: str) -> str:
    """Return words that no other workload's prompts begin with.

    They are the same in each round and on each server, for each of them began empty. A server by
    URL did not: it gets others in each visit.
    """
    if visit.server.url:
        workload += str(visit.kept.setdefault(_SALT, secrets.token_hex(SALT_HEX)))
    return f"{hashlib.blake2b(workload.encode()).hexdigest()[:SALT_HEX]} "


def salted(rows: Sequence[Captured], salt: str) -> list[Captured]:
    """Return the session with `salt` in front of its prompts, so that it shares none of another.

    It stands in the first message and in the first tool: templates differ in which comes first.
    """
    return [replace(row, body=_salted_body(row.dialect, row.body, salt)) for row in rows]


def _salted_body(dialect: str, body: Body, salt: str) -> Body:
    body = copy.deepcopy(body)
    name = {"messages": "system", "responses": "instructions"}.get(dialect, "")
    turns = body["messages" if "messages" in body else "input"]
    holder, key = (body, name) if body.get(name) else (turns[0], "content")
    content = holder[key]
    holder[key] = salt + content if isinstance(content, str) else _salted_parts(content, salt)
    for tool in (body.get("tools") or ())[:1]:
        told = tool.get("function", tool)
        told["description"] = salt + (told.get("description") or "")
    return body


def _salted_parts(parts: list[Body], salt: str) -> list[Body]:
    """Return `parts` with the salt in the first text that a client means.

    Servers look for Claude Code's header at the very front: in front of it they would not find it.
    """
    for number, part in enumerate(parts):
        text = part.get("text")
        if isinstance(text, str) and not text.startswith(_CLIENT_HEADER):
            return [*parts[:number], {**part, "text": salt + text}, *parts[number + 1 :]]
    raise ValueError("the first message has no text")
