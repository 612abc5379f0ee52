"""The format of Hermes, Qwen2.5 and Qwen3: an object in JSON between `<tool_call>` tags."""

from hearth.worker.formats.shared.format_parts import (
    LAST,
    CallGrammar,
    ModelFormat,
    Section,
    json_call,
)

FORMATS = (
    ModelFormat(  # EXAONE 4, which has no newlines around the object
        matches=lambda words: (
            '<tool_call>{"name"' in words.template and "<tool_call>\\n" not in words.template
        ),
        rank=LAST,
        sections=(Section("<tool_call>", "</tool_call>"),),
        grammar=CallGrammar(
            json_call('<tool_call>{"name": "', '", "arguments": ', "}</tool_call>"), "<tool_call>"
        ),
    ),
    ModelFormat(
        matches=lambda words: (
            words.tool_form == "manual"
            or (
                "<tool_call>" in words.template
                and ("tool_call.name" in words.template or "xml_tools" in words.template)
            )
        ),
        rank=LAST,
        sections=(Section("<tool_call>", "</tool_call>"),),
        grammar=CallGrammar(
            json_call('<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>"),
            "<tool_call>",
        ),
    ),
)
