"""Finds the tokens with which a chat template marks turns, by rendering probes.

Runs once, when a model is loaded. Touches no MLX.
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

    A message's header begins with a token of `header_ids`, and with the text `header_start`: Kimi
    K3 begins what a message consists of with the same token.
    """

    header_ids: frozenset[int]
    header_start: str
    assistant_texts: tuple[str, ...]  # what the model's own turns begin with
    ends: frozenset[int]  # what ends them, where anything does
    closing: frozenset[int]  # of `header_ids`, those that also end what others say
    moves_words: bool  # what is said beside a call stands behind its result


def history_marks(tokenizer: Any, marks: TurnMarks, end_ids: frozenset[int]) -> HistoryMarks:
    """Return the marks of the tokenizer's template; `end_ids` end what is generated."""
    texts = tuple(filter(None, map(tokenizer.decode, map(list, marks.assistant_headers))))
    between = _after_answer(tokenizer)
    closing = [token for token in between if token in _control_ids(tokenizer)][:1]
    ends = end_ids | (set(closing) - marks.header_ids)
    others = map(list, filter(None, _other_headers(tokenizer, marks.header_ids)))
    headers = [*texts, *map(tokenizer.decode, others)]
    start = "".join(headers[:1])[: _shared(headers)]
    closed, opened = (_after_question(tokenizer, True, adds) for adds in (False, True))
    headers_too = {*_result_end(tokenizer)[-1:]}
    if closed == opened:
        headers_too.update(header[0] for header in marks.assistant_headers)
    is_ended = not marks.header_ids.issuperset(closing)  # a turn of the model's, by another token
    text = _called(tokenizer, [], said=_THIRD)
    return HistoryMarks(
        header_ids=marks.header_ids,
        header_start=start,
        assistant_texts=texts,
        ends=ends,
        closing=frozenset(headers_too if is_ended else ()),
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
            # A message begins with the first that ends nothing; where all do, as GLM's role tokens,
            # with the first of them.
            others = [token for token in between if token not in ends]
            last = [token for token in between if token in ends]
            header_ids.update((_marks(tokenizer, others) or last or others)[:1])
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
    """Return what ends a result where an answer follows that at once, as Mistral's; else nothing.

    Its last token is then the header of the answer.
    """
    closed, opened = (_behind_result(tokenizer, adds_header=adds) for adds in (False, True))
    is_header = closed == opened == _behind_result(tokenizer, "assistant")
    return closed if is_header and {*closed[-1:]} & _control_ids(tokenizer) else ()


def _marks(tokenizer: Any, tokens: Sequence[int]) -> list[int]:
    """Return those that are no tags of a message's content, as <tool_response> and </response>.

    Such tags are added tokens, but not special.
    """
    added = tokenizer.added_tokens_decoder
    return [token for token in tokens if token not in added or added[token].special]


def _assistant_headers(
    prompts: list[tuple[int, ...]], written: list[tuple[int, ...]], others: list[tuple[int, ...]]
) -> tuple[tuple[int, ...], ...]:
    """Return what the model's own turns begin with, however they go on.

    Generation prompts with and without thinking, and headers of turns in the history, share their
    first tokens: that one header stands for all, unless other messages begin so too.
    """
    known = [header for header in (*prompts, *written) if header]
    shared = known[0][: _shared(known)] if known else ()
    is_ours = shared and not any(other[: len(shared)] == shared for other in others)
    return (shared,) if is_ours else tuple(prompts)


def _shared(rows: Sequence[Sequence[Any]]) -> int:
    """Return with how many equal items all the rows begin."""
    columns = zip(*rows, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda column: len({*column}) == 1, columns))


def _other_headers(tokenizer: Any, header_ids: Set[int]) -> list[tuple[int, ...]]:
    """Return what other messages than the model's begin with."""
    return [_header(tokenizer, role, header_ids) for role in ("system", "user", "tool")]


def _header(
    tokenizer: Any, role: str, header_ids: Set[int], is_old: bool = False
) -> tuple[int, ...]:
    """Return what the template writes in front of a `role` message's content.

    `is_old`: of one that a user's message follows, whose thinking templates leave out.
    """
    # Others behind an answer: some templates end a question with the answer's header.
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
    """Return every token that ends a turn: of the model, its generation config, its template.

    And of the model's format: `ends` end an answer, `part_ends` a part of one only.
    """
    configured = generation_config.get("eos_token_id")
    configured = configured if isinstance(configured, list) else [configured]
    known = tokenizer.get_vocab()
    ids = [*tokenizer.eos_token_ids, *configured, *map(known.get, ends)]
    ids += _template_ends(tokenizer, {known.get(each) for each in part_ends})
    return frozenset(token for token in ids if isinstance(token, int))


def _template_ends(tokenizer: Any, part_ends: Set[int | None] = frozenset()) -> list[int]:
    """Return the token that the template puts behind the answer that ends a conversation.

    Not what it puts between two messages: harmony ends a message of a turn, its reasoning for
    one, with <|end|>, and only the whole turn with <|return|>. And none of `part_ends`, which it
    puts in front of that one.
    """
    messages = [{"role": "user", "content": _FIRST}, {"role": "assistant", "content": _SECOND}]
    special = _control_ids(tokenizer) - part_ends
    tail = _ids_between(tokenizer, _probed(tokenizer, messages), _SECOND)
    ends = [token for token in tail if token in special]
    return [*(_marks(tokenizer, ends) or ends)][:1]


def _control_ids(tokenizer: Any) -> set[int]:
    """Return the tokens that no merge makes: what a template's marks are.

    `all_special_ids` alone has only those with a name of their own, such as eos_token.
    """
    return {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}


_CALL_ID = "abcdefgh0"  # Mistral's takes ids of nine characters only
_FIRST, _SECOND, _THIRD = "alpha", "omega", "sigma"  # words that no template writes by itself


def _generation_prompt(tokenizer: Any, thinking: bool) -> list[tuple[int, ...]]:
    """Return what the template puts in front of an answer, if it puts anything there."""
    closed = _after_question(tokenizer, thinking, False)
    opened = _after_question(tokenizer, thinking, True)
    if opened == closed:  # as Mistral's: the question's own end is what an answer follows
        special = _control_ids(tokenizer)
        has_prompt = list(_between(tokenizer, "user")[: len(opened)]) != opened
        between = opened if has_prompt else _between(tokenizer, "assistant")
        starts = [at for at, token in enumerate(between) if token in special]
        return [tuple(between[starts[0] :])] if starts else []
    common = _shared((closed, opened))
    return [tuple(opened[common:])] if common < len(opened) else []


def _after_question(tokenizer: Any, thinking: bool, add_generation_prompt: bool) -> list[int]:
    question, adds = [{"role": "user", "content": _FIRST}], add_generation_prompt
    known = {"enable_thinking": thinking}
    both = _probed(tokenizer, question, adds, **known, thinking=thinking)
    # A template that is a function takes only the name that it knows.
    return _ids_between(tokenizer, both or _probed(tokenizer, question, adds, **known), _FIRST)


def _between(tokenizer: Any, role: str, is_old: bool = False) -> Sequence[int]:
    """Return the tokens between the contents of a user's message and of a `role` message.

    A mark that stands on both sides of a content, as FunctionGemma's <escape>, is none between.
    """
    messages = [{"role": "user", "content": _FIRST}, {"role": role, "content": _SECOND}]
    messages += [{"role": "user", "content": _THIRD}] if is_old else []
    text = _probed(tokenizer, messages)
    between = _ids_between(tokenizer, text, _FIRST, _SECOND)
    tail, last = text.partition(_FIRST)[2].partition(_SECOND)[2], between[-1:]
    quotes = _control_ids(tokenizer).issuperset(last) and tail.startswith(tokenizer.decode(last))
    return between[:-1] if last and quotes else between


def _after_answer(tokenizer: Any, role: str = "user") -> Sequence[int]:
    """Return the tokens between an answer and the content of a `role` message behind it."""
    roles = (("user", _THIRD), ("assistant", _FIRST), (role, _SECOND))
    messages = [{"role": role, "content": content} for role, content in roles]
    return _ids_between(tokenizer, _probed(tokenizer, messages), _FIRST, _SECOND)


def _behind_result(tokenizer: Any, role: str = "", adds_header: bool = False) -> Sequence[int]:
    """Return the tokens between a call's result and a `role` message's content; "": the end."""
    behind = [{"role": role, "content": _THIRD}] if role else []
    text = _called(tokenizer, behind, adds_header=adds_header)
    return _ids_between(tokenizer, text, _SECOND, _THIRD if role else "")


def _ids_between(tokenizer: Any, text: str, start: str, end: str = "") -> list[int]:
    """Return the tokens between two words, or behind one; none where the text lacks them."""
    _, found, rest = text.partition(start)
    inner, is_whole, _ = rest.partition(end) if end else (rest, found, "")
    return list(tokenizer.encode(inner, add_special_tokens=False)) if is_whole else []


def _called(
    tokenizer: Any, behind: list[dict[str, Any]], said: str = "", adds_header: bool = False
) -> str:
    """Return a call with `said` beside it, its result and what is `behind`; "" of none shown."""
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
    """Return the rendered probe; "" where there is no template, or it does not allow this."""
    template = Template(tokenizer)
    probed = template.probed(messages, adds_header=adds_header, **variables)
    return probed if template.exists else ""
