"""Ollama's own clients, for Python and for JavaScript, against the running server."""

import json
import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import ollama
import pytest

from scripts.fixtures.embedding_checkpoints import embedding_checkpoint
from tests.helpers.clients.npm_clients import OLLAMA, NotInstallableError, node_bin, node_modules
from tests.helpers.clients.run_clients import MODEL
from tests.helpers.servers.scripted_server import ScriptedServer
from tests.helpers.servers.server import WAIT_S_MAX
from tests.helpers.worker_processes.scripted_worker import FREEDOM

KEY = "a-key-of-the-test"
CALLS = Path(__file__).parents[2] / "helpers" / "clients" / "ollama_calls.mjs"
HEADERS = {"Authorization": f"Bearer {KEY}"}
GREEDY: dict[str, Any] = {"temperature": 0}
HELLO = [{"role": "user", "content": "Hello"}]
WEATHER: list[Any] = [{"role": "user", "content": "Check the weather with city Lisbon."}]
PORTO: list[Any] = [{"role": "user", "content": "Check the weather with city Porto."}]
RESULT = {"role": "tool", "tool_name": "check_weather", "content": "The temperature is 17."}
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "check_weather",
        "description": "Check the weather.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}


def weather_of(city: str) -> list[dict[str, Any]]:
    """Return what the model says when it is asked for a city's weather."""
    return [{"calls": [("check_weather", {"city": city})]}, {"content": "It is 17 degrees."}]


ANSWERS: dict[str, Any] = {
    "Hello": [{"reasoning": "This is a greeting.", "content": "Good morning to you."}],
    WEATHER[0]["content"]: weather_of("Lisbon"),
    PORTO[0]["content"]: weather_of("Porto"),
}


def check_weather(city: str) -> str:
    """Check the weather.

    Args:
        city: Which one

    Returns:
        str: The temperature
    """
    return f"{city}: 17"


@pytest.fixture(scope="module")
def server() -> Iterator[ScriptedServer]:
    encoder = str(embedding_checkpoint("bert"))
    with ScriptedServer(PROXY_API_KEY=KEY, EMBEDDING_MODEL=encoder) as running:
        running.answer(ANSWERS)
        yield running


@pytest.fixture(scope="module")
def client(server: ScriptedServer) -> Iterator[ollama.Client]:
    with ollama.Client(host=server.url, headers=HEADERS) as made:
        yield made


@pytest.fixture(scope="module")
def from_javascript(server: ScriptedServer) -> Any:
    try:
        path, node = node_modules(OLLAMA) / "ollama" / "dist" / "index.mjs", node_bin() / "node"
    except NotInstallableError as error:
        pytest.fail(str(error))
    command = [str(node), str(CALLS), str(path), server.url, KEY, MODEL]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def asked(server: ScriptedServer, path: str, **body: Any) -> Any:
    """Return what a body without a stream is answered, with the fields that clients drop."""
    body = {"model": MODEL, "stream": False, **body}
    answer = httpx.post(server.url + path, json=body, headers=HEADERS, timeout=60)
    return answer.raise_for_status().json()


def test_models_are_listed_with_the_tag_that_clients_look_for(client: ollama.Client) -> None:
    row, embedder = client.list().models
    assert embedder.model is not None and embedder.model.endswith(":latest")
    assert row.model == f"{MODEL}:latest"
    assert row.details is not None and row.details.family == "qwen3"
    assert row.size and row.digest and len(row.digest) == 64
    (loaded,) = client.ps().models
    assert (loaded.name, loaded.context_length) == (f"{MODEL}:latest", 131072)


@pytest.mark.parametrize("name", [MODEL, f"{MODEL}:latest", MODEL.upper()])
def test_a_model_is_shown_by_every_form_of_its_name(client: ollama.Client, name: str) -> None:
    shown = client.show(name)
    assert shown.capabilities == ["completion", "tools", "thinking"]
    assert shown.modelinfo is not None
    architecture = shown.modelinfo["general.architecture"]
    assert shown.modelinfo[f"{architecture}.context_length"] == 131072


def test_a_chat_streams_what_it_answers_at_once(client: ollama.Client) -> None:
    options: dict[str, Any] = {"model": MODEL, "messages": HELLO, "options": GREEDY}
    whole = client.chat(**options)
    parts = list(client.chat(stream=True, **options))
    assert "".join(part.message.content or "" for part in parts) == whole.message.content
    assert whole.message.content == ANSWERS["Hello"][0]["content"]
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    for end in (whole, parts[-1]):
        assert end.done_reason == "stop" and end.eval_count and end.prompt_eval_count
        assert end.total_duration and end.eval_duration
        assert end.total_duration >= end.eval_duration


def test_a_function_is_called_and_its_result_read(client: ollama.Client) -> None:
    said = [*WEATHER]
    parts = list(client.chat(MODEL, said, tools=[check_weather], options=GREEDY, stream=True))
    (call,) = [call for part in parts for call in part.message.tool_calls or ()]
    assert call.function.name == "check_weather"
    assert call.function.arguments == {"city": "Lisbon"}
    (calling,) = [part.message for part in parts if part.message.tool_calls]
    answer = client.chat(MODEL, [*said, calling, RESULT], tools=[check_weather], options=GREEDY)
    assert answer.message.content == "It is 17 degrees."


def test_thinking_comes_where_it_is_asked_for(client: ollama.Client) -> None:
    for thinks in (True, False):
        chat = client.chat(MODEL, HELLO, think=thinks, options=GREEDY)
        assert bool(chat.message.thinking) == thinks
        generated = client.generate(MODEL, "Hello", think=thinks, options=GREEDY)
        assert bool(generated.thinking) == thinks


def test_an_answer_is_of_the_schema_that_is_asked_for(client: ollama.Client) -> None:
    schema = {
        "type": "object",
        "properties": {"n": {"enum": [1, 2]}},
        "required": ["n"],
        "additionalProperties": False,
    }
    free = [{"role": "user", "content": FREEDOM}]
    answer = client.chat(MODEL, free, format=schema, think=False, options=GREEDY)
    assert json.loads(answer.message.content or "")["n"] in (1, 2)
    generated = client.generate(MODEL, FREEDOM, format=schema, think=False, options=GREEDY)
    assert json.loads(generated.response or "")["n"] in (1, 2)


def test_a_context_remembers_what_was_said(client: ollama.Client, server: ScriptedServer) -> None:
    told = client.generate(MODEL, "Hello", options=GREEDY)
    client.generate(MODEL, "And then?", context=told.context, options=GREEDY)
    client.generate(MODEL, "And then?", options=GREEDY)
    with_context, without = server.prompts()[-2:]
    said = ANSWERS["Hello"][0]["content"]
    assert said in with_context and said not in without


def test_a_text_has_one_vector_by_either_route_and_by_openais(
    client: ollama.Client, server: ScriptedServer
) -> None:
    name = str(client.list().models[-1].model)
    assert client.show(name).capabilities == ["embedding"]
    texts = ["The sky is blue.", "Grass is green."]
    found = client.embed(name, texts)
    assert found.prompt_eval_count
    first, second = found.embeddings
    assert sum(x * x for x in first) == pytest.approx(1.0, abs=1e-5)
    assert list(client.embeddings(name, texts[0]).embedding) == pytest.approx(first, abs=1e-6)
    with server.openai(KEY) as gpt:
        theirs = gpt.embeddings.create(model=name, input=texts).data
    assert theirs[1].embedding == pytest.approx(second, abs=1e-6)
    assert len(client.embed(name, texts[0], dimensions=8).embeddings[0]) == 8
    with pytest.raises(ollama.ResponseError, match="not served at /v1/embeddings"):
        client.embed(MODEL, texts)


def test_errors_are_said_in_ollamas_way(client: ollama.Client, server: ScriptedServer) -> None:
    with pytest.raises(ollama.ResponseError, match="not served here") as caught:
        client.chat("llama3.2", HELLO)
    assert caught.value.status_code == 404
    for change in (client.pull, client.push, client.delete):
        with pytest.raises(ollama.ResponseError, match="no request changes") as caught:
            change("llama3.2")
        assert caught.value.status_code == 400
    with pytest.raises(ollama.ResponseError, match="no request changes"):
        client.create("mine", from_=MODEL)
    with pytest.raises(ollama.ResponseError, match="images"):
        client.chat(MODEL, [{**HELLO[0], "images": [b"\x89PNG\r\n\x1a\n"]}])
    stranger = ollama.Client(host=server.url, headers={"Authorization": "Bearer wrong"})
    for ask in (stranger.list, lambda: stranger.chat(MODEL, HELLO)):
        with pytest.raises(ollama.ResponseError, match="key is wrong") as caught:
            ask()
        assert caught.value.status_code == 401


def test_both_apis_find_what_the_other_has_read(server: ScriptedServer) -> None:
    """The same conversation is the same prompt, whichever API it comes by."""
    talk = [{"role": "user", "content": f"The code of the gate {n} is {n * 37}."} for n in range(9)]
    said = {"messages": talk, "temperature": 0, "enable_thinking": False}
    first = asked(server, "/v1/chat/completions", **said)
    ours: dict[str, Any] = {"options": GREEDY, "think": False}
    again = asked(server, "/api/chat", messages=talk, **ours)
    assert again["message"]["content"] == first["choices"][0]["message"]["content"]
    assert again["prompt_eval_count"] == first["usage"]["prompt_tokens"]
    assert again["kv_cache"]["match"] == "exact"
    talk += [again["message"], {"role": "user", "content": "What is the code of the gate 3?"}]
    more = asked(server, "/v1/chat/completions", **said)
    usage = more["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] > first["usage"]["prompt_tokens"]
    assert usage["kv_cache"]["divergence"] is None


def test_a_tool_loop_reads_nothing_twice(server: ScriptedServer) -> None:
    common: dict[str, Any] = {"tools": [TOOL], "options": GREEDY}
    talk = [*PORTO]
    for _ in range(3):
        called = asked(server, "/api/chat", messages=talk, **common)
        calls = [
            {
                "function": {
                    "name": call["function"]["name"],
                    "arguments": call["function"]["arguments"],
                }
            }
            for call in called["message"]["tool_calls"]
        ]  # Ollama's Python client drops ids
        talk += [{**called["message"], "tool_calls": calls}, RESULT]
        end = asked(server, "/api/chat", messages=talk, **common)
        assert end["kv_cache"]["prefix_length"] >= called["prompt_eval_count"]
        assert end["kv_cache"]["divergence"] is None
        talk += [end["message"], *PORTO]
    cold = asked(server, "/api/chat", messages=talk[:-2], use_kv_cache=False, **common)
    assert cold["kv_cache"]["prefix_length"] == 0
    warm_prompt, cold_prompt = (asked.ids for asked in server.asked()[-2:])
    assert cold_prompt == warm_prompt


def test_the_javascript_client_finds_the_same_server(from_javascript: Any) -> None:
    told = from_javascript
    assert told["list"][0] == f"{MODEL}:latest" and told["ps"] == [f"{MODEL}:latest"]
    assert len(told["embedded"]) == 2 and len(told["embedded"][0]) == len(told["embedded"][1]) > 8
    assert "thinking" in told["show"]["capabilities"]
    assert re.fullmatch(r"\d+\.\d+\.\d+", told["version"]["version"])
    hello = ANSWERS["Hello"][0]
    assert told["text"] == hello["content"]
    assert told["last"]["done"] and told["last"]["eval_count"]
    (call,) = told["calls"]
    assert call["function"]["arguments"] == {"city": "Lisbon"}
    assert told["answer"] == "It is 17 degrees."
    generated = told["generated"]
    assert generated == {"response": hello["content"], "thinking": hello["reasoning"]}
    assert told["aborted"] in ("AbortError", "")
    assert "hearth pull" in told["pull"]["message"] and told["pull"]["status"] == 400


def test_a_model_is_unloaded_by_wish_and_loaded_again(
    server: ScriptedServer, client: ollama.Client
) -> None:
    assert client.generate(MODEL, keep_alive=0).done_reason == "unload"
    deadline = time.monotonic() + WAIT_S_MAX
    while server.worker()["state"] != "unloaded":
        assert time.monotonic() < deadline, server.worker()
        time.sleep(0.05)
    assert client.ps().models == []
    assert client.list().models[0].size, "what was found out about it is still known"
    assert client.chat(MODEL).done_reason == "load"
    (loaded,) = client.ps().models
    assert loaded.name == f"{MODEL}:latest"
