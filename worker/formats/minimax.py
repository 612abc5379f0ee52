"""The forms of MiniMax M2 and M3; in M3's a mark stands in front of each tag, nested ones too."""

from typing import Final

import regex

from hearth.worker.formats.shared.format_parts import (
    CallGrammar,
    ModelFormat,
    RequestTools,
    Section,
    TagForm,
    json_text,
    tag_form,
    tagged,
)

M2, M2_END = "<minimax:tool_call>", "</minimax:tool_call>"
M2_FORM = tag_form(
    ('<invoke name="', '">\n'), ('<parameter name="', '">'), "</parameter>", "</invoke>"
)
MARK: Final = "]<]minimax[>["
START, END = f"{MARK}<tool_call>", f"{MARK}</tool_call>"


def unfold(tools: RequestTools, name: str, key: str, text: str) -> str:
    """Return as JSON the value of an argument, whose members and items may be elements."""
    first, *pieces = text.split(MARK)
    # Of each element that is open: its key, what knows its type, its text, its elements' values.
    opened: list[tuple[str, RequestTools, str, list[tuple[str, str]]]] = [(key, tools, first, [])]
    for piece in [*pieces, *["</"] * (len(pieces) + 1)]:
        tag, _, text = piece.lstrip().removeprefix("<").partition(">")
        if not tag.startswith("/"):
            opened.append((tag, opened[-1][1].within(name, opened[-1][0]), text, []))
            continue
        key, tools, text, values = opened.pop()
        value = "{" + ", ".join(f'"{json_text(each)}": {it}' for each, it in values) + "}"
        if not values:
            empty = [each for each in ("[]", "{}") if tools.fitting(name, key, each) == each]
            value = tools.fitting(name, key, text or (empty[0] if len(empty) == 1 else ""))
        elif {each for each, _ in values} == {"item"}:
            value = f"[{', '.join(it for _, it in values)}]"
        if not opened:
            break
        opened[-1][3].append((key, value))
    return value


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
        is_of=lambda words: M2 in words.template,
        sections=(Section(M2, M2_END), Section("<invoke name=", M2_END, is_head=True)),
        form=M2_FORM,
        grammar=CallGrammar(tagged(M2_FORM), M2, start=f"{M2}\n", end=f"\n{M2_END}"),
    ),
    ModelFormat(
        is_of=lambda words: MARK in words.template or MARK in words.vocabulary,
        thinking=("<mm:think>", "</mm:think>"),
        sections=(Section(START, END), Section(f"{MARK}<invoke", END, is_head=True)),
        form=FORM,
        grammar=CallGrammar(tagged(FORM), START, start=f"{START}\n", end=END, between=""),
    ),
)
