"""Answers what clients ask about a prompt's tokens: how many, which, their bytes, their text."""

from itertools import accumulate
from typing import Final

import numpy as np

from hearth.shared.errors import RequestError
from hearth.shared.wire_messages import Count, Counted
from hearth.worker.cache.block_hash import pack
from hearth.worker.cache.image_keys import PromptImages
from hearth.worker.requests.prompt_facts import PromptFacts
from hearth.worker.requests.session_prompt_builder import SessionPromptBuilder, is_raw

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
