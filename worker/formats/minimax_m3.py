"""The form of MiniMax M3: a mark in front of each tag, and what is nested is elements, too."""

from typing import Final

import regex

from hearth.worker.formats.shared.format_parts import (
    CallGrammar,
    ModelFormat,
    RequestTools,
    Section,
    TagForm,
    json_text,
    tagged,
)

MARK: Final = "]<]minimax[>["
START, END = f"{MARK}<tool_call>", f"{MARK}</tool_call>"


def unfold(tools: RequestTools, name: str, key: str, text: str) -> str:
    """Return as JSON the value of an argument, whose members and items may be elements."""
    first, *pieces = text.split(MARK)
    # Of each element that is open: its key, what knows its type, its text, its elements' values.
    elements: list[tuple[str, RequestTools, str, list[tuple[str, str]]]] = [(key, tools, first, [])]
    for piece in pieces:
        tag, _, inner = piece.lstrip().removeprefix("<").partition(">")
        if not tag.startswith("/"):
            key, tools, *_ = elements[-1]
            elements.append((tag, tools.within(name, key), inner, []))
        elif len(elements) > 1:
            *closed, values = elements.pop()
            elements[-1][3].append((closed[0], _json(name, *closed, values)))
    return _json(name, *elements[0])


def _json(
    name: str, key: str, tools: RequestTools, text: str, values: list[tuple[str, str]]
) -> str:
    if not values:
        return tools.fitting(name, key, text if text else tools.empty(name, key))
    if {each for each, _ in values} == {"item"}:
        return f"[{', '.join(value for _, value in values)}]"
    return "{" + ", ".join(f'"{json_text(each)}": {value}' for each, value in values) + "}"


_TAG: Final = regex.escape(MARK) + r"\s*+<"
FORM = TagForm(
    name=(f'{MARK}<invoke name="', '">'),
    key=(f"{MARK}<", ">"),
    value_end=f"{MARK}</{{}}>",
    call_end=f"{MARK}</invoke>",
    head=regex.compile(_TAG + r"invoke\s++name\s*+=\s*+\"(?P<name>[^\"<>\n]++)\"[^<>]*+>"),
    opens=regex.compile(_TAG + r"(?P<key>[^<>/]++)>"),
    begins=MARK,
    unfold=unfold,
    behind="\n",
)
FORMATS = (
    ModelFormat(
        is_of=lambda words: MARK in words.template or MARK in words.vocabulary,
        thinking=("<mm:think>", "</mm:think>"),
        sections=(Section(START, END), Section(f"{MARK}<invoke", END, is_head=True)),
        form=FORM,
        grammar=CallGrammar(tagged(FORM), START, start=f"{START}\n", end=END, between=""),
    ),
)
