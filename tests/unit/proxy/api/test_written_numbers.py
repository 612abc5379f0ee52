"""The digits of a call are those that were written: in each dialect's answers, and its requests."""

import asyncio
import json
import re
from typing import Any

import orjson
import pytest

from hearth.proxy.api.answer_frames import AdmittedRequest
from hearth.proxy.api.dialects import DIALECTS
from hearth.proxy.http.strict_json import parse_object
from hearth.proxy.request.parsed_request import ParsedRequest
from hearth.shared import wire_messages as wire
from hearth.worker.prompt.render_messages import Renderer
from scripts.harness.model_families import family
from tests.helpers.clients.api_events import Given, Scripted, called, done, frames_of, more
from tests.helpers.worker.output_formats import reader, streamed, tool

NUMBERS = (
    *("18446744073709551616", "123456789012345678901234567890", "6.02214076e23", "-0.0", "-0"),
    *("0.10000000000000000555", "1E5", "1.50", "-9223372036854775809"),
)
NO_DOUBLES = ("1e400", "7" * 5_000)  # which no model's answer gives: a client's JSON has no such
WRITTEN = {  # how a family writes the call of f with n
    "qwen3_5": "<tool_call>\n<function=f>\n<parameter=n>\n{}\n</parameter>\n</function>\n"
    "</tool_call>",
    "glm4": "<tool_call>f<arg_key>n</arg_key><arg_value>{}</arg_value></tool_call>",
    "minimax_m2": '<minimax:tool_call><invoke name="f"><parameter name="n">{}</parameter></invoke>'
    "</minimax:tool_call>",
    "qwen3": '<tool_call>\n{{"name": "f", "arguments": {{"n": {}}}}}\n</tool_call>',
    "mistral": '[TOOL_CALLS]f[ARGS]{{"n": {}}}',
}
ASKED = '{"role": "user", "content": "x"}'
CALL = '{"id": "c", "type": "function", "function": {"name": "f", "arguments": <A>}}'
CALLED = f'{{"messages": [{ASKED}, {{"role": "assistant", "tool_calls": [{CALL}]}}]}}'
USED = '{"type": "tool_use", "id": "c", "name": "f", "input": <A>}'
ITEM = '{"type": "function_call", "call_id": "c", "name": "f", "arguments": <A>}'
BODIES: dict[str, tuple[Any, str]] = {  # parser, a body with arguments
    "chat": (DIALECTS["chat"].parse, CALLED),
    "messages": (
        DIALECTS["messages"].parse,
        f'{{"messages": [{ASKED}, {{"role": "assistant", "content": [{USED}]}}]}}',
    ),
    "responses": (DIALECTS["responses"].parse, f'{{"input": [{ASKED}, {ITEM}]}}'),
    "ollama": (DIALECTS["ollama_chat"].parse, CALLED),
}
PIECE = re.compile(r'"(?:arguments|delta|partial_json)":"((?:[^"\\]|\\.)*)"')


def asked(dialect: str, arguments: str) -> ParsedRequest:
    parse, text = BODIES[dialect]
    written = json.dumps(arguments) if dialect in ("chat", "responses") else arguments
    request: ParsedRequest = parse(parse_object(text.replace("<A>", written).encode()))
    return request


@pytest.mark.parametrize("dialect", BODIES)
@pytest.mark.parametrize("name", WRITTEN)
def test_an_answer_has_the_digits_that_the_model_wrote(name: str, dialect: str) -> None:
    request = asked(dialect, "{}")
    api = DIALECTS[request.dialect]
    for number in NUMBERS:
        splitter = reader(name).splitter(False, [tool(("f", {"n": "number"}))])
        parts = streamed(splitter, WRITTEN[name].format(number), is_complete=True)
        rows: list[Given] = [called("c", parts[0].name, parts[0].text)]
        rows += [*(more(part.text) for part in parts[1:]), done("tool_calls")]
        admitted = AdmittedRequest(request, "m", Scripted(*rows))
        whole = orjson.dumps(asyncio.run(api.whole(admitted))).decode()
        stream = b"".join(frames_of(request, api.writer, rows)).decode()
        assert re.search(rf'\\?"n\\?": ?{re.escape(number)}\}}', whole)
        assert f": {number}}}" in stream + "".join(PIECE.findall(stream))


@pytest.mark.parametrize("dialect", BODIES)
@pytest.mark.parametrize("name", ["qwen3", "qwen3_5", "glm4", "mistral", "gemma3", "deepseek"])
def test_a_history_is_shown_to_the_model_with_its_digits(name: str, dialect: str) -> None:
    renderer = Renderer(family(name).tokenizer, True, True)
    for number in (*NUMBERS, *NO_DOUBLES):
        prompt = asked(dialect, f'{{"n":{number},"m":{{"k":[{number},"-0"]}}}}').prompt
        sent = wire.decode(wire.encode(wire.Submit("r", prompt, wire.Sampling())))
        assert isinstance(sent, wire.Submit)
        shown = renderer.render(sent.prompt.messages, [], {}).text
        assert re.search(rf'"k\\?": ?\[{re.escape(number)}, ?\\?"-0', shown)
        assert len(re.findall(rf"[ :\n=>]{re.escape(number)}[,\n<]", shown)) == 1
