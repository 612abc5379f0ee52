"""The formats of Command R+, R7B, A and A+: a list of calls in JSON after a mark."""

from typing import Final

from hearth.worker.formats.shared.format_parts import (
    NUMBER,
    CallGrammar,
    ModelFormat,
    Section,
    json_call,
    written_numbers,
)

ON_LINES: Final = {
    "lenient": True,
    "whitespace_pattern": r"\n {1,32}| ",
    "item_separator": ",",
    "key_separator": ":",
}
START, END = "<|START_ACTION|>", "<|END_ACTION|>"
FORMATS = (
    ModelFormat(
        matches=lambda words: START in words.template,
        thinking=("<|START_THINKING|>", "<|END_THINKING|>"),
        framing=("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"),
        part_ends=("<|END_RESPONSE|>", "<|END_TEXT|>"),
        sections=(Section(START, END),),
        grammar=CallGrammar(
            lambda lark, tool: lark.concat(
                *('{"tool_call_id": "', NUMBER),
                json_call('", "tool_name": "', '", "parameters": ', "}")(lark, tool),
            ),
            START,
            start=f"{START}[\n    ",
            end=f"\n]{END}",
            between=",\n    ",
        ),
    ),
    ModelFormat(  # Command R+
        matches=lambda words: "Action:\\n```json" in words.template,
        sections=(Section("Action:", "```", takes_any_name=False),),
        grammar=CallGrammar(
            lambda lark, tool: lark.concat(
                *('    {\n        "tool_name": "', lark.quoted(tool.name)),
                *('",\n        "parameters": ', lark.json(tool.schema, **ON_LINES), "\n    }"),
            ),
            "Action:\n```json",
            start="Action:\n```json\n[\n",
            end="\n]```",
            between=",\n",
        ),
        call_text=lambda name, arguments: written_numbers.dumps(
            [{"tool_name": name, "parameters": arguments}], indent=4
        )[2:-2],
    ),
)
