"""The formats of MiniMax M2 and M3; in M3's, a mark stands before every tag, nested or not."""

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
    """Return the JSON of an argument whose members and items may be elements."""
    first, *pieces = text.split(MARK)
    # For each open element: its key, the tools that have its type, its text, its members' values.
    opened: list[tuple[str, RequestTools, str, list[tuple[str, str]]]] = [(key, tools, first, [])]
    for piece in [*pieces, *["</"] * (len(pieces) + 1)]:
        tag, _, text = piece.lstrip().removeprefix("<").partition(">")
        if not tag.startswith("/"):
            opened.append((tag, opened[-1][1].member_tools(name, opened[-1][0]), text, []))
            continue
        key, tools, text, values = opened.pop()
        value = "{" + ", ".join(f'"{json_text(tag)}": {member}' for tag, member in values) + "}"
        kinds = [empty for empty in ("[]", "{}") if tools.argument_json(name, key, empty) == empty]
        if not values:
            value = tools.argument_json(name, key, text or (kinds[0] if len(kinds) == 1 else ""))
        elif {tag for tag, _ in values} == {"item"} and "[]" in kinds:
            value = f"[{', '.join(member for _, member in values)}]"
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
    after_call="\n",
)
FORMATS = (
    ModelFormat(
        matches=lambda words: M2 in words.template,
        sections=(Section(M2, M2_END), Section("<invoke name=", M2_END, is_head=True)),
        form=M2_FORM,
        grammar=CallGrammar(tagged(M2_FORM), M2, start=f"{M2}\n", end=f"\n{M2_END}"),
    ),
    ModelFormat(
        matches=lambda words: MARK in words.template or MARK in words.vocabulary,
        thinking=("<mm:think>", "</mm:think>"),
        sections=(Section(START, END), Section(f"{MARK}<invoke", END, is_head=True)),
        form=FORM,
        grammar=CallGrammar(tagged(FORM), START, start=f"{START}\n", end=END, between=""),
    ),
)
