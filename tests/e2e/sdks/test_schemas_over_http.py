"""Schemas in each dialect, whole and streamed: what is accepted holds, and no process is left."""

import json
import threading
from typing import Any, Final, Literal

import anthropic
import httpx
import ollama
import openai
import psutil
import pytest
from pydantic import BaseModel

from tests.helpers.clients.run_clients import MODEL
from tests.helpers.clients.sdk_conversations import TALKS, OllamaTalk, Sdks, Talk
from tests.helpers.servers.scripted_server import ScriptedServer
from tests.helpers.servers.server import WAIT_S_MAX, Server
from tests.helpers.worker_processes.scripted_worker import FREEDOM

CITY: Final = {"enum": ["Oslo", "Rome"]}
NEVER: Final = {"type": "string", "pattern": "(?=a)b"}
ASKED: Final[list[Any]] = [{"role": "user", "content": FREEDOM}]
EACH = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])


class Report(BaseModel):
    city: Literal["Oslo", "Rome"]
    days: Literal[1, 3, 7]
    is_warm: bool


def closed(**properties: Any) -> dict[str, Any]:
    kind = {"type": "object", "additionalProperties": False, "required": [*properties]}
    return {**kind, "properties": properties}


@pytest.fixture(params=[*TALKS.values(), OllamaTalk], ids=[*TALKS, "ollama"])
def talk(request: pytest.FixtureRequest, sdks: Sdks) -> Talk:
    made: Talk = request.param(sdks)
    made.options |= made.thinking(False)
    return made


@EACH
def test_an_answer_obeys_a_reference_to_a_property(talk: Talk, stream: bool) -> None:
    talk.options |= talk.formed(closed(city=CITY, next={"$ref": "#/properties/city"}))
    found = json.loads(talk.user(FREEDOM).ask(stream=stream).content)
    assert {*found} == {"city", "next"} and {*found.values()} <= {*CITY["enum"]}


@EACH
@pytest.mark.parametrize("dialect", TALKS)
def test_a_forced_call_obeys_all_but_the_keyword_that_no_grammar_holds(
    dialect: str, sdks: Sdks, stream: bool
) -> None:
    bad = {"anyOf": [NEVER | {"maxLength": 3}, CITY]}
    schema = closed(bad=bad, next={"$ref": "#/properties/bad/anyOf/1"})
    talk = TALKS[dialect](sdks)
    talk.options |= talk.thinking(False)
    tools = [{"name": "f", "description": "", "parameters": schema}]
    (call, *_) = talk.user(FREEDOM).ask(stream=stream, tools=tools, choice="required").calls
    assert len(call[1]["bad"]) <= len("Oslo") and call[1]["next"] in CITY["enum"]


@EACH
def test_an_answers_schema_that_no_grammar_holds_is_a_400_with_keyword_and_place(
    talk: Talk, stream: bool
) -> None:
    talk.options |= talk.formed(closed(city=CITY, bad={"anyOf": [CITY, NEVER]}))
    refusals = (openai.BadRequestError, anthropic.BadRequestError, ollama.ResponseError)
    with pytest.raises(refusals, match=r"at /properties/bad/anyOf/1: regex.*look-around"):
        talk.user(FREEDOM).ask(stream=stream)


def test_the_sdks_parse_an_answer_of_a_declared_type(sdks: Sdks) -> None:
    free: Any = {"extra_body": {"enable_thinking": False}}
    with sdks.gpt.chat.completions.stream(
        model=MODEL, messages=ASKED, response_format=Report, **free
    ) as events:
        chat: Any = events.get_final_completion()
    response = sdks.gpt.responses.parse(model=MODEL, input=FREEDOM, text_format=Report, **free)
    message: Any = sdks.claude.messages.parse(
        model=MODEL, max_tokens=900, messages=ASKED, output_format=Report, **free
    )
    parsed = (chat.choices[0].message.parsed, response.output_parsed, message.parsed_output)
    assert [type(each) for each in parsed] == [Report] * 3


# ---------------------------------------------------------------- processes


def asked_for(schema: Any, tokens: int = 90) -> dict[str, Any]:
    shape = {"type": "json_schema", "json_schema": {"name": "r", "schema": schema}}
    told = {"messages": ASKED, "response_format": shape, "max_tokens": tokens}
    return {"model": MODEL, "enable_thinking": False, **told}


def post(server: Server, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=WAIT_S_MAX)


class Reader(threading.Thread):
    """Reads a streamed answer's text."""

    def __init__(self, server: Server, body: dict[str, Any]) -> None:
        super().__init__()
        self.text, self.begun = "", threading.Event()
        self._server, self._body = server, body

    def run(self) -> None:
        with self._server.openai() as gpt:
            thinks = {"enable_thinking": self._body.pop("enable_thinking")}
            for chunk in gpt.chat.completions.create(**self._body, stream=True, extra_body=thinks):
                self.text += chunk.choices[0].delta.content or ""
                if len(self.text) > 40:
                    self.begun.set()


def processes(server: Server) -> set[int]:
    assert server.process is not None
    return {each.pid for each in psutil.Process(server.process.pid).children(recursive=True)}


def test_an_answer_starts_no_process_and_emptying_the_cache_cuts_none_under_way(
    scripted: ScriptedServer,
) -> None:
    before = processes(scripted)
    flags = {"type": "array", "items": {"type": "boolean"}, "minItems": 400, "maxItems": 400}
    body = asked_for(closed(flags=flags), 4_000)
    reader = Reader(scripted, dict(body))
    reader.start()
    assert reader.begun.wait(WAIT_S_MAX)
    scripted.forget()
    assert reader.is_alive(), "the answer is under way"
    assert processes(scripted) == before
    reader.join(WAIT_S_MAX)
    assert len(json.loads(reader.text)["flags"]) == 400
    assert post(scripted, body).status_code == 200
