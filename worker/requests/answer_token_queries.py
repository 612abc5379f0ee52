"""Answers what clients ask about a prompt's tokens: how many, which, their bytes, their text."""

from itertools import accumulate
from typing import Any, Final

import numpy as np

from hearth.shared.errors import RequestError
from hearth.shared.wire_messages import Count, Counted, Status
from hearth.worker.cache.block_hash import pack
from hearth.worker.cache.image_keys import PromptImages
from hearth.worker.requests.debug_prompt_log import RecentPrompts
from hearth.worker.requests.session_prompt_builder import PromptFacts, SessionPromptBuilder, is_raw
from hearth.worker.sessions.session_manager import SessionManager

TEXT_BYTES_MAX: Final = 16 * 1024 * 1024  # of one answer


def counted(
    message: Count, images: PromptImages, prompts: SessionPromptBuilder, facts: PromptFacts
) -> Counted:
    """Return the answer to `message`. Prompt thread.

    The tokens of messages are those that a request with the same messages is computed from.

    Raises:
        RequestError: the prompt is refused, or its text is too long to be told.
    """
    query = message.query
    if is_raw(message.prompt):
        ids = prompts.raw_ids(message.prompt, query)
        keys = pack(ids)
    else:
        _, built = prompts.build(
            message.prompt, images, adds_header=query.adds_header, is_counted=True
        )
        ids, keys = built.ids, built.keys
    about, count = message.request_id, len(ids)
    if query.tells == "count":
        return Counted(about, count)
    if query.tells == "text":
        text = prompts.text(keys.tolist())
        _check_size(len(text.encode()))
        return Counted(about, count, text=text)
    packed = _packed(ids)
    if query.tells == "ids":
        return Counted(about, count, packed)
    pieces = [facts.vocabulary.token_bytes(each) for each in ids]
    ends = list(accumulate(map(len, pieces)))
    _check_size(ends[-1] if ends else 0)
    return Counted(about, count, packed, b"".join(pieces), _packed(ends))


def _packed(numbers: list[int]) -> bytes:
    return np.array(numbers, dtype="<u4").tobytes()


def _check_size(nbytes: int) -> None:
    if nbytes > TEXT_BYTES_MAX:
        raise RequestError(
            f"The text of these tokens is {nbytes:,} bytes and this server tells "
            f"{TEXT_BYTES_MAX:,} at once. Send fewer tokens.",
            code="too_many_tokens",
        )


def session_report(
    message: Status, sessions: SessionManager, recent: RecentPrompts
) -> dict[str, Any]:
    """Return the body of the answer to `message`. Prompt thread.

    Raises:
        RequestError: the session or the prompt is unknown, or another key's.
    """
    if message.what == "sessions":
        return {"sessions": sessions.session_rows(message.key)}
    body: dict[str, Any] | None
    if message.what in ("session", "tree"):
        is_brief = message.what == "tree"
        body = sessions.lines_report(message.about, message.key, is_brief)
        text = f"No session {message.about!r:.80} is remembered by this worker."
    else:
        ids = recent.ids_of(message.about, message.key)
        body = {"ids": ids} if ids is not None else None
        text = f"No prompt of request {message.about!r:.80} is remembered by this worker."
    if body is None:
        raise RequestError(text, status=404, code="not_found")
    return body
