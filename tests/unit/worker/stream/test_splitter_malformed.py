"""Checks that malformed outputs of models are read as something sensible."""

from typing import Any

import pytest

from hearth.worker.stream.answer_parts import AnswerPart, AnswerParts, ToolCall
from tests.helpers.worker.output_formats import reader, streamed, tool

TOOLS = [
    *map(
        tool,
        {
            "read_file": {"path": "string", "limit": "integer"},
            "bash": {"command": "string"},
            "edit": {"path": "string", "old": "string", "new": "string"},
            "search": {"paths": "array", "deep": "boolean", "rate": "number", "o": "object"},
            "set-mode": {"mode": {"enum": ["a", "b"]}, "n": {"anyOf": [{"type": "integer"}]}},
            "now": {},
        }.items(),
    )
]
NOW = ToolCall("now", {})
LS = ToolCall("bash", {"command": "ls -la"})
ECHO = ToolCall("bash", {"command": 'echo "hi"'})


def calls(*found: ToolCall) -> AnswerParts:
    return AnswerParts(calls=found)


def read(format: str, text: str, is_complete: bool = True, **options: Any) -> AnswerParts:
    options = {"is_thinking": False, "tools": TOOLS, **options}
    splitter = reader(format).splitter(**options)
    streamed(splitter, text, is_complete)
    return splitter.collector.parts


# ---------------------------------------------------------------- JSON between marks


@pytest.mark.parametrize(
    ("body", "call"),
    [
        ('{"name": "bash", "arguments": {"command": "ls -la"}', LS),  # a brace too few
        ('{"name": "bash", "arguments": {"command": "ls -la"', LS),
        ('{"name": "bash", "arguments": {"command": "ls -la"}}}', LS),  # a brace too many
        ('{"name": "bash", "arguments": {"command": "ls -la"}}]', LS),
        ("{'name': 'bash', 'arguments': {'command': 'ls -la'}}", LS),
        ("{name: bash, arguments: {command: 'ls -la'}}", LS),
        ('{"name": "bash", "arguments": {"command": "ls -la",},}', LS),
        ('{"name": "bash", "parameters": {"command": "ls -la"}}', LS),
        ('{"name": "bash", "arguments": "{\\"command\\": \\"ls -la\\"}"}', LS),
        ('{"name": "bash", "arguments": "{\'command\': \'ls -la\'}"}', LS),
        ('{"name": "bash", "arguments": "ls -la"}', LS),  # the only argument, bare
        ('{"name": "functions.bash", "arguments": {"command": "ls -la"}}', LS),
        ('{"name="bash", "arguments": {"command": "ls -la"}}', LS),
        ('{"name": "bash", "arguments": {"command": "echo "hi""}}', ECHO),
        ('```json\n{"name": "bash", "arguments": {"command": "ls -la"}}\n```', LS),
        ('```\n{"name": "bash", "arguments": {"command": "ls -la"}}```', LS),
        ('[{"name": "bash", "arguments": {"command": "ls -la"}}]', LS),
        ('{"function": {"name": "bash", "arguments": {"command": "ls -la"}}}', LS),
        ('{"tool": "bash", "args": {"command": "ls -la"}}', LS),
        (
            '{"name": "bash", "arguments": {"command": "a\nb\tc"}}',
            ToolCall("bash", {"command": "a\nb\tc"}),
        ),
        (
            '{"name": "bash", "arguments": {"command": "\\d\\."}}',
            ToolCall("bash", {"command": "\\d\\."}),
        ),
        (
            '{"name": "search", "arguments": {"deep": True, "o": None}}',
            ToolCall("search", {"deep": True, "o": None}),
        ),
        ('{"name": "now"}', NOW),
        ('{"name": "now", "arguments": null}', NOW),
        ('{"name": "now", "arguments": ""}', NOW),
        ("<function=bash>\n<parameter=command>\nls -la\n</parameter>\n</function>", LS),
        ("<function=bash><parameter=command>ls -la</parameter></function>", LS),
        ("bash<arg_key>command</arg_key><arg_value>ls -la</arg_value>", LS),
        ('<invoke name="bash"><parameter name="command">ls -la</parameter></invoke>', LS),
        ('bash {"command": "ls -la"}', LS),
        ("now", NOW),
    ],
)
def test_a_call_between_tags_is_understood_in_any_form(body: str, call: ToolCall) -> None:
    for format in ("qwen3", "qwen3_5", "glm4", "mistral", "llama3"):
        for end in ("\n</tool_call>", "</tool_call>\n", ""):
            assert read(format, f"<tool_call>\n{body}{end}") == calls(call), (format, end)
        twice = f"<tool_call>{body}</tool_call>\n" * 2
        assert read(format, f"A.\n{twice}\nB.") == AnswerParts("", "A.\nB.", (call, call)), format


def test_arguments_that_are_a_text_need_the_mark_behind_them() -> None:
    for format in ("qwen3", "glm4", "mistral"):
        assert read(format, "<tool_call>bash ls -la</tool_call>") == calls(LS)
        assert read(format, "<tool_call>bash ls -la").content.endswith("bash ls -la")


@pytest.mark.parametrize(
    "body",
    [
        "",
        "{",
        "{}",
        '{"name": ',
        '{"name": "bash"',
        '{"answer": 42}',
        '{"name": "nobody", "arguments": {"a": ',
        '{"name": "bash", "arguments": [1]}',
        '{"name": "bash", "arguments": 5}',
        '{"arguments": {"a": 1}}',
        "I would call bash here.",
        "<b>bash</b>",
        "[1, 2]",
        "<function=>",
        "<parameter=command>ls</parameter>",
        "nobody(1)",
    ],
)
def test_what_is_no_call_is_content_as_written_but_for_tokens(body: str) -> None:
    for format in ("qwen3", "qwen3_5", "glm4", "minimax_m2", "gemma3"):
        text = f"A \n<tool_call>{body}</tool_call> B"
        if '"bash"' in body and "arguments" not in body:
            continue  # the mark behind it ends it, and it needs no arguments
        said = text if format in ("minimax_m2", "gemma3") else f"A \n{body} B"
        assert read(format, text) == AnswerParts("", said), format
        assert read(format, f"<tool_call>{body}", is_complete=False).calls == ()


def test_a_tool_that_nobody_offered_is_called_only_as_the_template_does() -> None:
    """History may show tools that are gone; elsewhere such a text is more likely a quotation."""
    text = '<tool_call>{"name": "gone", "arguments": {"a": 1}}</tool_call>'
    assert read("qwen3", text) == calls(ToolCall("gone", {"a": 1}))
    assert read("qwen3", text, tools=[]) == calls(ToolCall("gone", {"a": 1}))
    assert read("mistral", text) == AnswerParts("", text)
    assert read("qwen3", text, takes_calls=False) == AnswerParts("", text)


# ---------------------------------------------------------------- elements


@pytest.mark.parametrize(
    ("body", "call"),
    [
        ("<arg_key>command</arg_key>ls -la</arg_value>", LS),
        ("<arg_key>command</arg_key>\\n<arg_value>ls -la</arg_value>\\n", LS),
        (
            "<arg_key>command</arg_key><arg_value>a </arg_value> b</arg_value>",
            ToolCall("bash", {"command": "a </arg_value> b"}),
        ),
        ("<arg_key>command</arg_key><arg_value></arg_value>", ToolCall("bash", {"command": ""})),
        (
            "<arg_key> command </arg_key>\n<arg_value>\nls -la\n</arg_value>",
            ToolCall("bash", {"command": "\nls -la\n"}),
        ),
        ("<arg_key>command</arg_key>", ToolCall("bash", {})),
    ],
)
def test_glms_elements_may_have_gaps(body: str, call: ToolCall) -> None:
    for format in ("glm4", "laguna", "qwen3"):
        assert read(format, f"<tool_call>bash{body}</tool_call>") == calls(call), format
        assert read(format, f"<tool_call>bash\n{body}\n</tool_call>\n") == calls(call), format


# ---------------------------------------------------------------- thinking


@pytest.mark.parametrize(
    ("format", "tail", "may_think"),
    [
        ("glm4", "<|assistant|>", True),
        ("glm4", "<|assistant|>\n<think></think>", False),
        ("glm4", "<|assistant|>\n<think>", False),
        ("qwen3", "<|im_start|>assistant\n", False),
        ("harmony", "<|start|>assistant", False),
    ],
)
def test_only_glm_may_leave_out_the_opening_mark(format: str, tail: str, may_think: bool) -> None:
    assert reader(format).may_think(tail) == may_think


# ---------------------------------------------------------------- as it comes


def test_a_call_goes_out_as_soon_as_it_is_known() -> None:
    splitter = reader("qwen3").splitter(False, TOOLS)
    fed = ["I look.\n", "<tool_", "call>\n{", '"name": "ba', 'sh", ', '"arguments": {', '"command"']
    fed += [': "ls', " -la", '"}}', "\n</tool_call>", "\n", "So."]
    parts = [splitter.feed(text) for text in fed]
    assert parts == [
        [AnswerPart("content", "I look.")],
        [],
        [],
        [],
        [],
        [AnswerPart("tool_call", "{", "bash")],
        [],
        [AnswerPart("tool_call", '"command": "ls')],
        [AnswerPart("tool_call", " -la")],
        [],
        [AnswerPart("tool_call", '"}')],
        [],
        [AnswerPart("content", "\nSo.")],
    ]
    assert splitter.finish(is_complete=True) == []


def test_elements_go_out_one_by_one_and_texts_as_they_come() -> None:
    splitter = reader("qwen3_5").splitter(False, TOOLS)
    pieces = {
        "<tool_call>\n<function=read": "",
        "_file>\n<": "{",
        "parameter=limit>\n1": "",
        "0\n</parameter>": "",
        "\n<parameter=path>\n": '"limit": 10',
        "src/": ', "path": "src/',
        "main.py": "main.py",
        "\n</para": "",
        "meter>\n": "",
        "</function>\n</tool_call>": '"}',
    }
    parts = {fed: "".join(part.text for part in splitter.feed(fed)) for fed in pieces}
    assert parts == pieces
    assert splitter.finish(is_complete=True) == []


def test_a_call_that_was_cut_off_before_its_name_is_content_without_its_mark() -> None:
    texts = {"<tool_call>": "", '<tool_call>{"name": "ba': '{"name": "ba', "<function=ba": "ba"}
    for text, content in texts.items():
        assert read("qwen3_5", text, is_complete=False) == AnswerParts("", content)
        assert read("qwen3_5", f"`{text}", is_complete=False).content == f"`{content}"
