"""Renders the prompt that is likely to follow an answer, so that idle time can prefill it."""

import dataclasses
import logging
from typing import Any

from hearth.shared.errors import RequestError
from hearth.worker.cache.block_hash import common_length, prefix_hashes
from hearth.worker.cache.image_keys import keys_of
from hearth.worker.cache.prefix_search import PrefixQuery
from hearth.worker.requests.session_prompt_builder import PromptFacts, SessionPromptBuilder
from hearth.worker.schedule.request_state import Request
from hearth.worker.sessions.echoed_turn_match import TurnContent
from hearth.worker.sessions.turn_store import Turn

log = logging.getLogger(__name__)


def predict_next_prompt(
    request: Request, prompts: SessionPromptBuilder, facts: PromptFacts
) -> PrefixQuery | None:
    """Return the beginning of the prompt that follows an answer. Prompt thread.

    It ends where the next message begins. None where the answer's own tokens stand there as they
    were fed, so that the slot holds them, or where the template refuses such a conversation.
    """
    assert request.slot is None, request.request_id
    visit = request.visit
    if visit is None or visit.said is None:
        return None
    try:
        # The conversation with the answer, and the messages that will follow it, empty.
        echo, following = _continuation(visit.said, visit.turn)
        content = prompts.content(visit.prompt, visit, visit.images)
        before = len(content.messages) - content.continues
        content = dataclasses.replace(
            content,
            messages=[*content.messages[:before], echo, *following],
            turns=[*content.turns[:before], visit.turn, *(None for _ in following)],
        )
        built = prompts.builder.build(content, adds_header=False)
    except RequestError as error:  # nothing is lost but the head start
        log.debug("the next prompt cannot be foreseen: %s", error.code)
        return None
    ends = [request.end_id] if request.end_id is not None else []
    fed = keys_of([*request.ids, *request.sampled, *ends], request.query.images)
    tokens = built.keys[: prompts.builder.last_header(built.ids)]
    if common_length(tokens, fed) >= min(len(tokens), len(fed)):
        return None
    cuts, root = facts.cut_rule.natural(tokens), request.query.root or facts.root
    names = prefix_hashes(root, tokens, cuts)
    images = tuple(run.bare() for run in built.images if run.end <= len(tokens))
    return PrefixQuery(
        tokens,
        cuts,
        names,
        request.query.conversation,
        root=root,
        images=images,
        system_end=facts.cut_rule.system_end(tokens),
        adapter=request.query.adapter,
    )


def _continuation(
    said: TurnContent, turn: Turn | None
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return an answer as a client echoes it, and what it will send behind it, empty."""
    echo: dict[str, Any] = {"role": "assistant", "content": said.content}
    if said.reasoning:
        echo["reasoning_content"] = said.reasoning
    if not said.calls:
        return echo, [{"role": "user", "content": ""}]
    ids = turn.call_ids if turn is not None else ()
    if len(ids) != len(said.calls):  # it was cut off
        ids = tuple(f"call{n:05d}" for n in range(len(said.calls)))
    echo["tool_calls"] = [
        {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        for call_id, (name, arguments) in zip(ids, said.calls, strict=True)
    ]
    return echo, [{"role": "tool", "tool_call_id": call_id, "content": ""} for call_id in ids]
