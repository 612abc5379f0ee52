"""Ollama's own clients, for Python and for JavaScript, and what only its API has.

What it has in common with the others is in test_sdk_answers.py.
"""

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import ollama
import pytest

from scripts.fixtures.embedding_checkpoints import embedding_checkpoint
from tests.helpers.clients.npm_clients import OLLAMA, NotInstallableError, node_bin, node_modules
from tests.helpers.clients.run_clients import MODEL
from tests.helpers.servers.scripted_server import ScriptedServer
from tests.helpers.servers.server import until

KEY: Final = "a-key-of-the-test"
CALLS: Final = Path(__file__).parents[2] / "helpers" / "clients" / "ollama_calls.mjs"
GREEDY: Final[dict[str, Any]] = {"temperature": 0}
HELLO: Final[Any] = [{"role": "user", "content": "Hello"}]
GREETING: Final = {"reasoning": "This is a greeting.", "content": "Good morning to you."}
WEATHER: Final = [
    {"calls": [("check_weather", {"city": "Lisbon"})]},
    {"content": "It is 17 degrees."},
]


@pytest.fixture(scope="module")
def server() -> Iterator[ScriptedServer]:
    encoder = str(embedding_checkpoint("bert"))
    with ScriptedServer(PROXY_API_KEY=KEY, EMBEDDING_MODEL=encoder) as running:
        running.answer({"Hello": [GREETING], "Check the weather with city Lisbon.": WEATHER})
        yield running


@pytest.fixture(scope="module")
def client(server: ScriptedServer) -> Iterator[ollama.Client]:
    with ollama.Client(host=server.url, headers={"Authorization": f"Bearer {KEY}"}) as made:
        yield made


def test_models_are_listed_and_shown_by_every_form_of_their_names(client: ollama.Client) -> None:
    row, embedder = client.list().models
    assert row.model == f"{MODEL}:latest" and str(embedder.model).endswith(":latest")
    assert row.details is not None and row.details.family == "qwen3"
    assert row.size and row.digest and len(row.digest) == 64
    (loaded,) = client.ps().models
    assert (loaded.name, loaded.context_length) == (f"{MODEL}:latest", 131072)
    for name in (MODEL, f"{MODEL}:latest", MODEL.upper()):
        shown = client.show(name)
        assert shown.capabilities == ["completion", "tools", "thinking"]
        about: Any = shown.modelinfo
        assert about[f"{about['general.architecture']}.context_length"] == 131072


def test_an_answer_has_its_times_and_a_function_is_called(client: ollama.Client) -> None:
    def check_weather(city: str) -> str:
        """Check the weather.

        Args:
            city: Which one
        """
        return f"{city}: 17"

    whole = client.chat(MODEL, HELLO, options=GREEDY)
    assert whole.total_duration and whole.eval_duration
    assert whole.total_duration >= whole.eval_duration
    asked: Any = [{"role": "user", "content": "Check the weather with city Lisbon."}]
    message = client.chat(MODEL, asked, tools=[check_weather], options=GREEDY).message
    (call,) = message.tool_calls or ()
    assert (call.function.name, call.function.arguments) == ("check_weather", {"city": "Lisbon"})


def test_a_context_remembers_what_was_said(client: ollama.Client, server: ScriptedServer) -> None:
    told = client.generate(MODEL, "Hello", options=GREEDY)
    client.generate(MODEL, "And then?", context=told.context, options=GREEDY)
    client.generate(MODEL, "And then?", options=GREEDY)
    with_context, without = server.prompts()[-2:]
    assert GREETING["content"] in with_context and GREETING["content"] not in without


def test_a_text_has_one_vector_by_either_route_and_by_openais(
    client: ollama.Client, server: ScriptedServer
) -> None:
    name = str(client.list().models[-1].model)
    assert client.show(name).capabilities == ["embedding"]
    texts = ["The sky is blue.", "Grass is green."]
    first, second = client.embed(name, texts).embeddings
    assert list(client.embeddings(name, texts[0]).embedding) == pytest.approx(first, abs=1e-6)
    with server.openai(KEY) as gpt:
        theirs = gpt.embeddings.create(model=name, input=texts).data
    assert theirs[1].embedding == pytest.approx(second, abs=1e-6)
    assert len(client.embed(name, texts[0], dimensions=8).embeddings[0]) == 8


def test_errors_are_said_in_ollamas_way(client: ollama.Client, server: ScriptedServer) -> None:
    stranger = ollama.Client(host=server.url, headers={"Authorization": "Bearer wrong"})
    seen: Any = [{**HELLO[0], "images": [b"\x89PNG\r\n\x1a\n"]}]
    for status, says, ask in (
        (404, "not served here", lambda: client.chat("llama3.2", HELLO)),
        (400, "no request changes", lambda: client.pull("llama3.2")),
        (400, "images", lambda: client.chat(MODEL, seen)),
        (404, "not served at /v1/embeddings", lambda: client.embed(MODEL, "x")),
        (401, "key is wrong", lambda: stranger.chat(MODEL, HELLO)),
    ):
        with pytest.raises(ollama.ResponseError, match=says) as caught:
            ask()
        assert caught.value.status_code == status


def test_the_javascript_client_finds_the_same_server(server: ScriptedServer) -> None:
    try:
        path, node = node_modules(OLLAMA) / "ollama" / "dist" / "index.mjs", node_bin() / "node"
    except NotInstallableError as error:
        pytest.fail(str(error))
    command = [str(node), str(CALLS), str(path), server.url, KEY, MODEL]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["list"][0] == f"{MODEL}:latest" and told["ps"] == [f"{MODEL}:latest"]
    assert len(told["embedded"]) == 2 and len(told["embedded"][0]) == len(told["embedded"][1]) > 8
    assert "thinking" in told["show"]["capabilities"]
    assert re.fullmatch(r"\d+\.\d+\.\d+", told["version"]["version"])
    assert told["text"] == GREETING["content"] and told["last"]["done"]
    assert [call["function"]["arguments"] for call in told["calls"]] == [{"city": "Lisbon"}]
    assert told["answer"] == "It is 17 degrees."
    thought, content = GREETING.values()
    assert told["generated"] == {"response": content, "thinking": thought}
    assert told["aborted"] in ("AbortError", "")
    assert "hearth pull" in told["pull"]["message"] and told["pull"]["status"] == 400


def test_a_model_is_unloaded_by_wish_and_loaded_again(
    server: ScriptedServer, client: ollama.Client
) -> None:
    assert client.generate(MODEL, keep_alive=0).done_reason == "unload"
    until(lambda: server.worker()["state"] == "unloaded")
    assert client.ps().models == []
    assert client.list().models[0].size, "what was found out about it is still known"
    assert client.chat(MODEL).done_reason == "load"
    assert [row.name for row in client.ps().models] == [f"{MODEL}:latest"]
