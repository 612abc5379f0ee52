"""Checks that malformed outputs of models are read as something sensible."""

from typing import Any

import pytest

from hearth.worker.stream.answer_parts import AnswerParts, ToolCall
from hearth.worker.stream.answer_splitter import AnswerPart
from hearth.worker.stream.tool_calls import python_calls
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
    return splitter.parts


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
        assert read(format, "<tool_call>bash ls -la") == AnswerParts("", "<tool_call>bash ls -la")


@pytest.mark.parametrize("end", ["", "</tool_call>", "</tool_call>\n"])
def test_a_string_may_lack_its_end(end: str) -> None:
    text = '<tool_call>{"name": "bash", "arguments": {"command": "ls -la'
    assert read("qwen3", text + end) == calls(LS)


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
def test_what_is_no_call_is_content_as_written(body: str) -> None:
    for format in ("qwen3", "qwen3_5", "glm4", "minimax_m2", "gemma3"):
        text = f"A \n<tool_call>{body}</tool_call> B"
        if '"bash"' in body and "arguments" not in body:
            continue  # the mark behind it ends it, and it needs no arguments
        assert read(format, text) == AnswerParts("", text), format
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
    ("text", "parts"),
    [
        # The opening tag is missing, as Qwen3-Coder likes to do behind prose.
        (
            "Look:\n\n<function=bash>\n<parameter=command>\nls -la\n</parameter>\n</function>\n"
            "</tool_call>",
            AnswerParts("", "Look:", (LS,)),
        ),
        ("<function=bash>\n<parameter=command>\nls -la\n</parameter>\n</function>", calls(LS)),
        ("Write <function=NAME> for a call.", AnswerParts("", "Write <function=NAME> for a call.")),
        # The function's tag says parameter.
        (
            "<tool_call>\n<parameter=bash>\n<parameter=command>\nls -la\n</parameter>\n</function>",
            calls(LS),
        ),
        # Closing tags are missing.
        (
            "<tool_call>\n<function=bash>\n<parameter=command>\nls -la\n</function>\n</tool_call>",
            calls(LS),
        ),
        ("<tool_call>\n<function=bash>\n<parameter=command>\nls -la\n</tool_call>", calls(LS)),
        ("<tool_call>\n<function=bash>\n<parameter=command>\nls -la", calls(LS)),
        ("<tool_call>\n<function=bash>\n<parameter=command>\nls -la\n</parameter>", calls(LS)),
        (
            "<tool_call>\n<function=edit>\n<parameter=path>\na\n<parameter=old>\nb\n</parameter>\n"
            "<parameter=new>\nc\n</parameter>\n</function>\n</tool_call>",
            calls(ToolCall("edit", {"path": "a", "old": "b", "new": "c"})),
        ),
        # JSON where the arguments belong.
        (
            '<tool_call>\n<function=bash>\n{"command": "ls -la"}\n</function>\n</tool_call>',
            calls(LS),
        ),
        # A text where the schema has another type.
        (
            "<tool_call>\n<function=search>\n<parameter=rate>\nfast\n</parameter>\n"
            "<parameter=deep>\nTrue\n</parameter>\n<parameter=paths>\n['a']\n</parameter>\n"
            "</function>\n</tool_call>",
            calls(ToolCall("search", {"rate": "fast", "deep": True, "paths": ["a"]})),
        ),
        (
            "<tool_call>\n<function=set-mode>\n<parameter=mode>\na\n</parameter>\n<parameter=n>\n7\n"
            "</parameter>\n<parameter=more>\n8\n</parameter>\n</function>\n</tool_call>",
            calls(ToolCall("set-mode", {"mode": "a", "n": 7, "more": "8"})),
        ),
        # Given twice: the first one was told already.
        (
            "<tool_call>\n<function=bash>\n<parameter=command>\nls -la\n</parameter>\n"
            "<parameter=command>\nrm\n</parameter>\n</function>\n</tool_call>",
            calls(LS),
        ),
        # What looks like an end within an argument.
        (
            "<tool_call>\n<function=bash>\n<parameter=command>\necho '</parameter>' '</function>' "
            "'</tool_call>'\n</parameter>\n</function>\n</tool_call>",
            calls(
                ToolCall("bash", {"command": "echo '</parameter>' '</function>' '</tool_call>'"})
            ),
        ),
    ],
)
def test_qwens_elements_may_have_gaps(text: str, parts: AnswerParts) -> None:
    assert read("qwen3_5", text) == parts
    if "<tool_call>" in text:
        assert read("llama3", text) == parts


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


# ---------------------------------------------------------------- other formats


@pytest.mark.parametrize(
    ("format", "text", "parts"),
    [
        ("mistral", '[TOOL_CALLS]bash[ARGS]{"command": "ls -la"', calls(LS)),
        ("mistral", '[TOOL_CALLS][{"name": "bash", "arguments": {"command": "ls -la"}}', calls(LS)),
        (
            "mistral",
            '[TOOL_CALLS]bash[ARGS]{"command": "ls -la"} Done.',
            AnswerParts("", "Done.", (LS,)),
        ),
        ("mistral", "[TOOL_CALLS] none", AnswerParts("", "[TOOL_CALLS] none")),
        ("mistral", '[TOOL_CALLS]{"name": "bash", "arguments": {"command": "ls -la"}}', calls(LS)),
        ("llama3", '{"name": "bash", "parameters": {"command": "ls -la"}', calls(LS)),
        ("llama3", '{"name": "bash", "parameters": "{\\"command\\": \\"ls -la\\"}"}', calls(LS)),
        (
            "llama3",
            '{"name": "bash"} is what I call',
            AnswerParts("", "is what I call", (ToolCall("bash", {}),)),
        ),
        ("llama3", 'Call {"name": "now"}', AnswerParts("", 'Call {"name": "now"}')),
        ("llama3", "<|python_tag|>print(1)", AnswerParts("", "<|python_tag|>print(1)")),
        ("qwen3", '```json\n{"name": "now", "arguments": {}}\n```', calls(NOW)),
        ("qwen3", '```json\n{"a": 1}\n```', AnswerParts("", '```json\n{"a": 1}\n```')),
        ("harmony", "<|channel|>commentary to=functions.bash<|message|>ls -la", calls(LS)),
        (
            "harmony",
            '<|channel|>commentary to=functions.bash<|message|>{"command": "ls -la"',
            calls(LS),
        ),
        (
            "harmony",
            "<|channel|>commentary to=functions.edit<|message|>x",
            calls(ToolCall("edit", "x")),
        ),
        ("harmony", "<|channel|>commentary to=functions.now<|message|> \n<|call|>", calls(NOW)),
        ("gemma4", '<|tool_call>call:bash{command:<|"|>ls -la<|"|>}', calls(LS)),
        ("gemma4", '<|tool_call>call:bash{command:<|"|>ls -la', calls(LS)),
        ("gemma4", "<|tool_call>call:bash{command:ls -la}<tool_call|>", calls(LS)),
        ("gemma4", '<|tool_call>call:bash{"command": "ls -la"}<tool_call|>', calls(LS)),
        ("gemma4", '<|tool_call>{"name": "now", "arguments": {}}<tool_call|>', calls(NOW)),
        (
            "kimi_k2",
            '<|tool_call_begin|>functions.bash:0<|tool_call_argument_begin|>{"command": "ls -la"',
            calls(LS),
        ),
        (
            "minimax_m2",
            '<minimax:tool_call><invoke name="bash"><parameter name="command">ls -la',
            calls(LS),
        ),
        (
            "minimax_m2",
            '<minimax:tool_call><invoke name="bash"><parameter name="command">ls -la</parameter>'
            "</invoke> Done.",
            AnswerParts("", "Done.", (LS,)),
        ),
        ("pythonic", '<|tool_call_start|>[bash(command="ls -la")]', calls(LS)),
        (
            "pythonic",
            '<|tool_call_start|>[set-mode(mode="a")]<|tool_call_end|>',
            calls(ToolCall("set-mode", {"mode": "a"})),
        ),
        ("pythonic", "<|tool_call_start|>now<|tool_call_end|>", calls(NOW)),
        ("gemma3", '```tool_code\nbash(command="ls -la")', calls(LS)),
        ("gemma3", "```tool_code\nbash('ls -la')\n```", calls(LS)),
        (
            "gemma3",
            '```tool_code\nbash(command="ls -la", **{"x": 1})\n```',
            calls(ToolCall("bash", {"command": "ls -la", "x": 1})),
        ),
        (
            "gemma3",
            '```tool_code\nbash(command="```\\n```")\n```',
            calls(ToolCall("bash", {"command": "```\n```"})),
        ),
        (
            "gemma3",
            "```tool_code\nos.system('ls')\n```",
            AnswerParts("", "```tool_code\nos.system('ls')\n```"),
        ),
        (
            "gemma3",
            "```tool_code\nbash(command=x)\n```",
            AnswerParts("", "```tool_code\nbash(command=x)\n```"),
        ),
    ],
)
def test_other_formats_may_have_gaps(format: str, text: str, parts: AnswerParts) -> None:
    assert read(format, text) == parts


# ---------------------------------------------------------------- thinking


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("a </think> b", AnswerParts("", "a  b")),
        ("a\n</think>\n\nb", AnswerParts("", "a\nb")),
        ("</think>\n\nb", AnswerParts("", "b")),
        ("a </think> b </think> c", AnswerParts("", "a  b </think> c")),
        ("the `</think>` mark", AnswerParts("", "the `</think>` mark")),
        ("a <think> b </think> c", AnswerParts("", "a <think> b </think> c")),
        ("<think>a<think>b</think>c", AnswerParts("a<think>b", "c")),
        ("<think></think><think>a</think>b", AnswerParts("a", "b")),
        ("<think>a</think>b<think>c</think>d", AnswerParts("a", "b<think>c</think>d")),
        ("<think>a", AnswerParts("a")),
        ("<think>a</thin", AnswerParts("a</thin")),
        ("<thi", AnswerParts("", "<thi")),
    ],
)
def test_think_marks_may_stand_where_they_should_not(text: str, parts: AnswerParts) -> None:
    assert read("qwen3", text) == parts
    assert read("glm4", text) == parts


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("why\n</think>\nyes", AnswerParts("why", "yes")),
        ("<think>why</think>yes", AnswerParts("why", "yes")),
        ("why\n<tool_call>now</tool_call>", AnswerParts("why", "", (NOW,))),
        ("a plain answer", AnswerParts("a plain answer", "a plain answer")),
        ("", AnswerParts()),
    ],
)
def test_a_model_that_may_leave_out_the_opening_mark_begins_with_reasoning(
    text: str, parts: AnswerParts
) -> None:
    assert read("glm4", text, may_think=True) == parts


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


@pytest.mark.parametrize(
    ("format", "text", "delivered"),
    [
        (
            "qwen3",
            '<tool_call>{"name": "bash", "arguments": {"command": "rm -rf /foo',
            '{"command": "rm -rf /foo',
        ),
        (
            "qwen3_5",
            "<tool_call>\n<function=bash>\n<parameter=command>\nrm -rf /foo",
            '{"command": "rm -rf /foo',
        ),
        ("qwen3_5", "<tool_call>\n<function=bash>\n", "{"),
        (
            "glm4",
            "<tool_call>bash<arg_key>command</arg_key><arg_value>rm -rf /foo",
            '{"command": "rm -rf /foo',
        ),
        ("gemma4", '<|tool_call>call:bash{command:<|"|>rm -rf /foo', '{"command": "rm -rf /foo'),
        (
            "harmony",
            '<|channel|>commentary to=functions.bash<|message|>{"command": "rm -rf /foo',
            '{"command": "rm -rf /foo',
        ),
        (
            "harmony",
            "<|channel|>commentary to=functions.bash<|message|>rm -rf /foo",
            '{"command": "rm -rf /foo',
        ),
    ],
)
def test_a_call_that_was_cut_off_stays_open(format: str, text: str, delivered: str) -> None:
    assert read(format, text, is_complete=False) == calls(ToolCall("bash", delivered))


def test_a_call_that_was_cut_off_before_its_name_is_content() -> None:
    for text in ("<tool_call>", '<tool_call>\n{"name": "ba', "<tool_call>\n<function=ba"):
        assert read("qwen3_5", text, is_complete=False) == AnswerParts("", text)


def test_what_a_parser_raises_is_counted() -> None:
    before = python_calls.failures.total()
    read("gemma3", "```tool_code\nbash(command=\n```")
    assert python_calls.failures.total() > before
