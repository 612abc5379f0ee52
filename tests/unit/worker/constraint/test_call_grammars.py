"""Grammars of calls, format by format: what they let through, and that its parser reads it."""

import importlib
import random
from functools import cache
from typing import Any

import jsonschema
import pytest

from hearth.shared.errors import RequestError
from hearth.shared.wire_messages import Constraints
from hearth.worker.constraint.grammar_compiler import GrammarCompiler
from scripts.harness.constrained_answers import (
    Walk,
    closers,
    constrainer_for,
    tool,
    walk,
    with_parser,
)
from scripts.harness.model_families import bare_tokenizer, family

TOOLS = [
    tool(
        "get_weather",
        {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 8},
                "days": {"type": "integer", "minimum": 1, "maximum": 9},
                "unit": {"type": "string", "enum": ["c", "f"]},
                "flags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
            },
            "required": ["city", "unit"],
        },
    ),
    tool("get", {"type": "object", "properties": {"n": {"$ref": "#/$defs/N"}}, "required": ["n"]}
        | {"$defs": {"N": {"type": "integer", "minimum": 0, "maximum": 5}}}),
    tool("elsewhere", {"properties": {"x": {"type": "boolean"}}, "required": ["x"]}),
    tool("stop", None),
]  # fmt: skip
SCHEMAS = {each["function"]["name"]: each["function"].get("parameters", {}) for each in TOOLS}

# Parser of mlx-lm, or a form of our own -> calls as its documentation writes them.
WRITTEN = {
    "json_tools": [
        '<tool_call>\n{"name": "get", "arguments": {"n": 3}}\n</tool_call>',
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Ulm", "unit": "c"}}\n'
        '</tool_call>\n<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call>',
    ],
    "qwen3_coder": [
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nUlm <b>\n</parameter>\n"
        "<parameter=days>\n3\n</parameter>\n<parameter=unit>\nf\n</parameter>\n</function>\n</tool_call>",
        "<tool_call>\n<function=stop>\n</function>\n</tool_call>",
    ],
    "glm47": [
        "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Ulm</arg_value>\n"
        "<arg_key>unit</arg_key>\n<arg_value>c</arg_value>\n</tool_call>",
        "<tool_call>get<arg_key>n</arg_key><arg_value>4</arg_value></tool_call>",
        "<tool_call>stop</tool_call>",
    ],
    "longcat": [
        "<longcat_tool_call>get\n<longcat_arg_key>n</longcat_arg_key>\n"
        "<longcat_arg_value>4</longcat_arg_value>\n</longcat_tool_call>",
    ],
    "minimax_m2": [
        '<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Ulm</parameter>\n'
        '<parameter name="unit">c</parameter>\n</invoke>\n</minimax:tool_call>',
    ],
    "minicpm5": ['<function name="get"><param name="n">2</param></function>'],
    "muse_spark": [
        '<atem:function_calls>\n<atem:invoke name="get">\n<atem:parameter name="n">2'
        "</atem:parameter>\n</atem:invoke>\n</atem:function_calls>",
    ],
    "mistral": [
        '[TOOL_CALLS][{"name": "get", "arguments": {"n": 0}}, '
        '{"name": "stop", "arguments": {}}]',
    ],
    "kimi_k2": [
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.get:0<|tool_call_argument_begin|>"
        '{"n": 1}<|tool_call_end|><|tool_calls_section_end|>',
    ],
    "kimi_k3": [
        '<|open|>tools<|sep|><|open|>call tool="get" index="1"<|sep|>'
        '<|open|>json type="object"<|sep|>{"n": 1}<|close|>json<|sep|>'
        "<|close|>call<|sep|><|close|>tools<|sep|>",
    ],
    "gemma4": [
        '<|tool_call>call:get_weather{city:<|"|>Ulm<|"|>,unit:<|"|>c<|"|>,flags:[true,false]}'
        "<tool_call|>",
        "<|tool_call>call:stop{}<tool_call|>",
    ],
    "function_gemma": [
        "<start_function_call>call:get_weather{city:<escape>Ulm<escape>,days:2,unit:<escape>c<escape>}"
        "<end_function_call>",
    ],
    "pythonic": [
        '<|tool_call_start|>[get_weather(city="Ulm", unit="f"), get(n=2)]<|tool_call_end|>',
    ],
    "bare": ['{"name": "get", "parameters": {"n": 1}}'],
    "manual": ['<tool_call>\n{"name": "get", "arguments": {"n": 3}}\n</tool_call>'],
    "tool_code": [
        '```tool_code\nget_weather(city="Ulm", unit="f")\n```\n```tool_code\nstop()\n```',
    ],
    "mistral_heads": ['[TOOL_CALLS]get[ARGS]{"n": 3}'],
}  # fmt: skip
PARSED = [name for name in WRITTEN if name not in ("bare", "manual", "tool_code", "mistral_heads")]
FAMILY_OF = {"qwen3_coder": "qwen3_5", "glm47": "glm4", "mistral": "mistral", "json_tools": "qwen3"}
SINGLE = ("bare",)


def parser_of(name: str) -> Any:
    return importlib.import_module(f"mlx_lm.tool_parsers.{name}")


@cache
def constrainer(name: str) -> GrammarCompiler:
    """Return a constrainer for a format: of its family, or in plain text."""
    if name in FAMILY_OF:
        return constrainer_for(family(FAMILY_OF[name]))
    base = family("llama3")
    if name in PARSED:
        return constrainer_for(base, with_parser(base, parser_of(name)))
    if name == "mistral_heads":
        tokenizer = with_parser(base, parser_of("mistral"))
        vocabulary = tokenizer.get_vocab() | {"[ARGS]": 0}
        bare_tokenizer(tokenizer).get_vocab = lambda: vocabulary
        return constrainer_for(base, tokenizer)
    return constrainer_for(base, tool_form="native" if name == "bare" else name)


def required(**more: Any) -> Constraints:
    return Constraints(tool_choice="required", **more)


def begun(name: str, constraints: Constraints) -> tuple[Walk, Any]:
    found = constrainer(name)
    tools = TOOLS[:3] if name == "longcat" else TOOLS  # its parser needs an argument
    return walk(found, constraints, tools), found.tokenizer


@cache
def closing(name: str) -> frozenset[int]:
    return closers(constrainer(name).tokenizer)


def takes(name: str, text: str, constraints: Constraints | None = None) -> bool:
    started, tokenizer = begun(name, constraints or required())
    return started.takes(tokenizer.encode(text, add_special_tokens=False))


@pytest.mark.parametrize(("name", "text"), [(n, t) for n, texts in WRITTEN.items() for t in texts])
def test_a_call_as_it_is_documented_is_let_through(name: str, text: str) -> None:
    assert takes(name, text)


@pytest.mark.parametrize("name", WRITTEN)
def test_neither_words_nor_unknown_tools_nor_wrong_values_are_let_through(name: str) -> None:
    text = WRITTEN[name][0]
    assert not takes(name, "")
    assert not takes(name, "Let me see.")
    assert not takes(name, text + " and so on")
    assert not takes(name, text.replace("get", "got"))
    for good, bad in (('"n": 3', '"n": 7'), ('"unit": "c"', '"unit": "g"'), (":2,", ":0,")):
        assert good not in text or not takes(name, text.replace(good, bad))


@pytest.mark.parametrize("name", WRITTEN)
def test_only_named_tools_may_be_called(name: str) -> None:
    used = [each for each in SCHEMAS if f"{each}" in WRITTEN[name][0]]
    assert takes(name, WRITTEN[name][0], required(tool_names=used))
    assert not takes(name, WRITTEN[name][0], required(tool_names=["elsewhere"]))


@pytest.mark.parametrize("name", [name for name in WRITTEN if name not in SINGLE])
def test_several_calls_need_leave(name: str) -> None:
    rolled = [rolled_calls(name, required(parallel_calls=False), seed) for seed in range(6)]
    assert all(len(calls) == 1 for calls in rolled if calls is not None)


def rolled_calls(name: str, constraints: Constraints, seed: int) -> list[Any] | None:
    """Return the calls of a random answer as mlx-lm reads them; None where it did not end."""
    started, tokenizer = begun(name, constraints)
    if not started.roll(random.Random(seed), closing(name), 300):
        return None
    text = tokenizer.decode(started.tokens)
    parser = parser_of(
        name if name in PARSED else {"mistral_heads": "mistral"}.get(name, "json_tools")
    )
    start, end = parser.tool_call_start, parser.tool_call_end
    if name == "bare":
        start, end = "", ""
    if name == "tool_code":
        parser, start, end = parser_of("pythonic"), "```tool_code\n", "\n```"
    found: list[Any] = []
    for piece in text.split(start)[1:] if start else [text]:
        body = piece.rpartition(end)[0] if end else piece
        body = f"[{body}]" if name == "tool_code" else body
        calls = parser.parse_tool_call(body, TOOLS)
        found += calls if isinstance(calls, list) else [calls]
    return found


@pytest.mark.parametrize("name", WRITTEN)
def test_what_is_let_through_is_read_as_calls_that_the_schemas_allow(name: str) -> None:
    """Upstream's parsers leave a value as text where its type is behind a reference."""
    ended = 0
    for seed in range(12):
        calls = rolled_calls(name, required(), seed)
        ended += calls is not None
        for call in calls or []:
            schema = SCHEMAS[call["name"]]
            arguments = call.get("arguments", call.get("parameters"))
            if isinstance(arguments.get("n"), str):
                arguments["n"] = int(arguments["n"])
            if "city" in arguments:
                arguments["city"] = str(arguments["city"])
            jsonschema.validate(arguments, schema)
    assert ended >= 8


def test_a_call_that_no_grammar_tells_is_refused() -> None:
    odd = type(
        "odd", (), {"parse_tool_call": print, "tool_call_start": "<o>", "tool_call_end": "</o>"}
    )
    base = family("llama3")
    found = constrainer_for(base, with_parser(base, odd))
    with pytest.raises(RequestError, match='Use tool_choice "auto"') as caught:
        found.token_mask(required(), TOOLS, "", 0)
    assert caught.value.status == 400


def test_a_format_without_nesting_leaves_optional_lists_out_and_refuses_required_ones() -> None:
    nested = tool("f", {"properties": {"a": {"type": "array"}}, "required": ["a"]})
    with pytest.raises(RequestError, match="'a', an array or an object"):
        constrainer("function_gemma").token_mask(required(), [nested], "", 0)
    assert not takes("function_gemma", WRITTEN["function_gemma"][0].replace("days:2", "flags:[]"))


def test_harmony_calls_in_both_of_its_forms() -> None:
    found = constrainer_for(family("harmony"))
    for text in (
        '<|channel|>commentary to=functions.get <|constrain|>json<|message|>{"n": 1}',
        ' to=functions.get<|channel|>commentary json<|message|>{"n": 1}',
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary "
        'to=functions.get <|constrain|>json<|message|>{"n":1}',
    ):
        started = walk(found, required(), TOOLS, "<|start|>assistant")
        assert started.takes(found.tokenizer.encode(text, add_special_tokens=False)), text
    started = walk(found, required(), TOOLS, "<|start|>assistant")
    assert not started.takes(found.tokenizer.encode("<|channel|>final<|message|>No."))
