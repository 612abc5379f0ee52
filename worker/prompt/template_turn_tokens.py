"""Finds the tokens with which a chat template marks turns, by rendering probes.

Runs once, when a model is loaded. Does not touch MLX.
"""

import itertools
from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import Any

from hearth.worker.prompt.chat_template import Template
from hearth.worker.prompt.prefill_cuts import TurnMarks


@dataclass(frozen=True, slots=True)
class HistoryMarks:
    """The tokens and texts with which the model's own turns begin and end. Immutable.

    A message's header begins with a token of `header_ids` and with the text `header_start`. Kimi K3
    begins the parts of a message with the same token, so the text decides too.
    """

    header_ids: frozenset[int]
    header_start: str
    assistant_texts: tuple[str, ...]  # beginnings of the model's own turns
    ends: frozenset[int]  # tokens that end the model's own turns
    closing: frozenset[int]  # tokens of `header_ids` that also end other messages
    moves_words: bool  # whether words beside a call are rendered after the result


def history_marks(tokenizer: Any, marks: TurnMarks, end_ids: frozenset[int]) -> HistoryMarks:
    """Return the marks of the tokenizer's template; `end_ids` end generated turns."""
    texts = tuple(filter(None, map(tokenizer.decode, map(list, marks.assistant_headers))))
    between = _after_answer(tokenizer)
    closing = [token for token in between if token in _control_ids(tokenizer)][:1]
    ends = end_ids | (set(closing) - marks.header_ids)
    others = map(list, filter(None, _other_headers(tokenizer, marks.header_ids)))
    headers = [*texts, *map(tokenizer.decode, others)]
    start = "".join(headers[:1])[: _shared_length(headers)]
    closed, opened = (_after_question(tokenizer, True, adds) for adds in (False, True))
    closing_headers = {*_result_end(tokenizer)[-1:]}
    if closed == opened:
        closing_headers.update(header[0] for header in marks.assistant_headers)
    is_ended = not marks.header_ids.issuperset(closing)  # another token ends the model's turns
    text = _called(tokenizer, [], said=_THIRD)
    return HistoryMarks(
        header_ids=marks.header_ids,
        header_start=start,
        assistant_texts=texts,
        ends=ends,
        closing=frozenset(closing_headers if is_ended else ()),
        moves_words=text.find(_SECOND) < text.find(_THIRD),
    )


def turn_marks(tokenizer: Any) -> TurnMarks:
    """Return the tokens with which the tokenizer's template marks messages."""
    prompts = sorted(
        {p for thinking in (True, False) for p in _generation_prompt(tokenizer, thinking)}
    )
    special = _control_ids(tokenizer)
    ends = {*tokenizer.eos_token_ids, *_template_ends(tokenizer)}
    header_ids = {prompt[0] for prompt in prompts if prompt[0] in special}
    for role in ("system", "user", "assistant", "tool"):
        between = [token for token in _between(tokenizer, role) if token in special]
        if not header_ids.intersection(between):
            # A message begins with the first token that ends no turn. If all tokens end turns, as
            # GLM's role tokens do, a message begins with the first token.
            not_ends = [token for token in between if token not in ends]
            turn_ends = [token for token in between if token in ends]
            header_ids.update((_marks(tokenizer, not_ends) or turn_ends or not_ends)[:1])
    usable = [prompt for prompt in prompts if prompt[0] in header_ids]
    other_headers = _other_headers(tokenizer, header_ids)
    written = [_header(tokenizer, "assistant", header_ids, is_old) for is_old in (False, True)]
    headers = _assistant_headers(usable, written, other_headers)
    closing = _result_end(tokenizer)
    ends_results = bool(closing) and header_ids.isdisjoint(closing)
    if ends_results:
        header_ids.add(closing[-1])
        headers += (tuple(closing[-1:]),)
    assert all(header[0] in header_ids for header in headers), (headers, header_ids)
    counts_tools = Template(tokenizer).counts_tools
    return TurnMarks(frozenset(header_ids), headers, is_r3=ends_results or counts_tools)


def _result_end(tokenizer: Any) -> Sequence[int]:
    """Return the tokens that end a result if an answer follows at once, as with Mistral; else none.

    The last of these tokens is the answer's header.
    """
    closed, opened = (_behind_result(tokenizer, adds_header=adds) for adds in (False, True))
    is_header = closed == opened == _behind_result(tokenizer, "assistant")
    return closed if is_header and {*closed[-1:]} & _control_ids(tokenizer) else ()


def _marks(tokenizer: Any, tokens: Sequence[int]) -> list[int]:
    """Return the tokens except tags inside a message, such as <tool_response> and </response>.

    Such tags are added tokens, but not special.
    """
    added = tokenizer.added_tokens_decoder
    return [token for token in tokens if token not in added or added[token].special]


def _assistant_headers(
    prompts: list[tuple[int, ...]], written: list[tuple[int, ...]], others: list[tuple[int, ...]]
) -> tuple[tuple[int, ...], ...]:
    """Return the beginnings of the model's own turns, however the turns go on.

    Generation prompts with and without thinking, and headers in the history, share their first
    tokens. If no other messages begin with the shared tokens, only the shared tokens are returned.
    """
    known = [header for header in (*prompts, *written) if header]
    shared = known[0][: _shared_length(known)] if known else ()
    is_distinct = shared and not any(other[: len(shared)] == shared for other in others)
    return (shared,) if is_distinct else tuple(prompts)


def _shared_length(rows: Sequence[Sequence[Any]]) -> int:
    """Return the number of first items that all rows share."""
    columns = zip(*rows, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda column: len({*column}) == 1, columns))


def _other_headers(tokenizer: Any, header_ids: Set[int]) -> list[tuple[int, ...]]:
    """Return the headers of the messages that the model does not write."""
    return [_header(tokenizer, role, header_ids) for role in ("system", "user", "tool")]


def _header(
    tokenizer: Any, role: str, header_ids: Set[int], is_old: bool = False
) -> tuple[int, ...]:
    """Return the tokens that the template writes in front of a `role` message's content.

    `is_old`: a user's message follows, and so templates leave out the thinking.
    """
    # Other roles are probed after an answer: some templates end a question with an answer's header.
    is_own = role == "assistant"
    between = list(_between(tokenizer, role, is_old) if is_own else _after_answer(tokenizer, role))
    starts = [at for at, token in enumerate(between) if token in header_ids]
    return tuple(between[starts[-1] :]) if starts else ()


def end_of_turn_ids(
    tokenizer: Any,
    generation_config: dict[str, Any],
    ends: Sequence[str] = (),
    part_ends: Sequence[str] = (),
) -> frozenset[int]:
    """Return every token that ends a turn, by the tokenizer, the generation config or the template.

    The model's format gives `ends`, which end an answer, and `part_ends`, which end only a part.
    """
    configured = generation_config.get("eos_token_id")
    configured = configured if isinstance(configured, list) else [configured]
    known = tokenizer.get_vocab()
    ids = [*tokenizer.eos_token_ids, *configured, *map(known.get, ends)]
    ids += _template_ends(tokenizer, {known.get(text) for text in part_ends})
    return frozenset(token for token in ids if isinstance(token, int))


def _template_ends(tokenizer: Any, part_ends: Set[int | None] = frozenset()) -> list[int]:
    """Return the token that the template puts after the last answer of a conversation.

    A token between two messages does not count: harmony ends a message of a turn, such as its
    reasoning, with <|end|>, and only the whole turn with <|return|>. `part_ends`, which may come
    before the returned token, do not count either.
    """
    messages = [{"role": "user", "content": _FIRST}, {"role": "assistant", "content": _SECOND}]
    special = _control_ids(tokenizer) - part_ends
    tail = _ids_between(tokenizer, _probed(tokenizer, messages), _SECOND)
    ends = [token for token in tail if token in special]
    return [*(_marks(tokenizer, ends) or ends)][:1]


def _control_ids(tokenizer: Any) -> set[int]:
    """Return the tokens that no merge makes; these include a template's marks.

    `all_special_ids` has only tokens with a name of their own, such as eos_token.
    """
    return {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}


_CALL_ID = "abcdefgh0"  # Mistral's template takes only ids of nine characters
_FIRST, _SECOND, _THIRD = "alpha", "omega", "sigma"  # words that no template writes by itself


def _generation_prompt(tokenizer: Any, thinking: bool) -> list[tuple[int, ...]]:
    """Return the tokens that the template puts in front of an answer, if any."""
    closed = _after_question(tokenizer, thinking, False)
    opened = _after_question(tokenizer, thinking, True)
    if opened == closed:  # as with Mistral, where an answer directly follows the question
        special = _control_ids(tokenizer)
        has_prompt = list(_between(tokenizer, "user")[: len(opened)]) != opened
        between = opened if has_prompt else _between(tokenizer, "assistant")
        starts = [at for at, token in enumerate(between) if token in special]
        return [tuple(between[starts[0] :])] if starts else []
    common = _shared_length((closed, opened))
    return [tuple(opened[common:])] if common < len(opened) else []


def _after_question(tokenizer: Any, thinking: bool, add_generation_prompt: bool) -> list[int]:
    question, adds = [{"role": "user", "content": _FIRST}], add_generation_prompt
    known = {"enable_thinking": thinking}
    both = _probed(tokenizer, question, adds, **known, thinking=thinking)
    # A template that is a function takes only variables that it knows.
    return _ids_between(tokenizer, both or _probed(tokenizer, question, adds, **known), _FIRST)


def _between(tokenizer: Any, role: str, is_old: bool = False) -> Sequence[int]:
    """Return the tokens between the contents of a user's message and of a `role` message.

    Marks on both sides of a content, such as FunctionGemma's <escape>, do not count.
    """
    messages = [{"role": "user", "content": _FIRST}, {"role": role, "content": _SECOND}]
    messages += [{"role": "user", "content": _THIRD}] if is_old else []
    text = _probed(tokenizer, messages)
    between = _ids_between(tokenizer, text, _FIRST, _SECOND)
    tail, last = text.partition(_FIRST)[2].partition(_SECOND)[2], between[-1:]
    quotes = _control_ids(tokenizer).issuperset(last) and tail.startswith(tokenizer.decode(last))
    return between[:-1] if last and quotes else between


def _after_answer(tokenizer: Any, role: str = "user") -> Sequence[int]:
    """Return the tokens between an answer and the content of the next `role` message."""
    roles = (("user", _THIRD), ("assistant", _FIRST), (role, _SECOND))
    messages = [{"role": role, "content": content} for role, content in roles]
    return _ids_between(tokenizer, _probed(tokenizer, messages), _FIRST, _SECOND)


def _behind_result(tokenizer: Any, role: str = "", adds_header: bool = False) -> Sequence[int]:
    """Return the tokens between a call's result and a `role` message's content; "" = to the end."""
    behind = [{"role": role, "content": _THIRD}] if role else []
    text = _called(tokenizer, behind, adds_header=adds_header)
    return _ids_between(tokenizer, text, _SECOND, _THIRD if role else "")


def _ids_between(tokenizer: Any, text: str, start: str, end: str = "") -> list[int]:
    """Return the tokens between two words, or after one word; none if the text lacks a word."""
    _, found, rest = text.partition(start)
    inner, is_whole, _ = rest.partition(end) if end else (rest, found, "")
    return list(tokenizer.encode(inner, add_special_tokens=False)) if is_whole else []


def _called(
    tokenizer: Any, behind: list[dict[str, Any]], said: str = "", adds_header: bool = False
) -> str:
    """Return the text of a message with `said` and a call, the result, and `behind`.

    Return "" if the template does not show the result.
    """
    shapes: tuple[Any, ...] = ({}, "{}")
    for arguments in shapes:
        function = {"name": _FIRST, "arguments": arguments}
        call = {"id": _CALL_ID, "type": "function", "function": function}
        messages: list[dict[str, Any]] = [
            {"role": "user", "content": _FIRST},
            {"role": "assistant", "content": said, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": _CALL_ID, "content": _SECOND},
            *behind,
        ]
        text = _probed(tokenizer, messages, adds_header)
        if _SECOND in text:
            return text
    return ""


def _probed(
    tokenizer: Any, messages: list[dict[str, Any]], adds_header: bool = False, **variables: Any
) -> str:
    """Return the rendered probe, or "" without a template or if the template refuses the probe."""
    template = Template(tokenizer)
    probed = template.probed(messages, adds_header=adds_header, **variables)
    return probed if template.exists else ""
