"""Open WebUI itself against the running server, over OpenAI's API and over Ollama's."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from scripts.fixtures.embedding_checkpoints import embedding_checkpoint
from tests.helpers.clients.open_webui import NEEDS_OPEN_WEBUI, OpenWebUI
from tests.helpers.clients.run_clients import MODEL
from tests.helpers.servers.scripted_server import ScriptedServer
from tests.helpers.worker_processes.scripted_worker import DICTATION

pytestmark = [NEEDS_OPEN_WEBUI, pytest.mark.night]

KEY = "sk-open-webui"
TOOL = '''
class Tools:
    def code_of_gate(self, name: str) -> str:
        """
        Return the code of a gate.
        :param name: the name of the gate
        """
        return f"The code of the {name} gate is 7731."
'''
CALL = '<tool_call>\n{"name": "code_of_gate", "arguments": {"name": "north"}}\n</tool_call>'


PASSAGES = [
    f"{name} built the {part} of the {place} in {year}, of {stuff}."
    for name, part, place, year, stuff in (
        ("Ann", "tower", "harbour", 1021, "red brick"),
        ("Boris", "well", "market square", 1377, "granite"),
        ("Clara", "roof", "old library", 1590, "slate and lead"),
        ("David", "bridge", "mill stream", 1744, "oak"),
    )
]


@pytest.fixture(scope="module")
def server() -> Iterator[ScriptedServer]:
    encoder = str(embedding_checkpoint("bert"))
    with ScriptedServer(PROXY_API_KEY=KEY, EMBEDDING_MODEL=encoder) as running:
        yield running


@pytest.fixture(scope="module", params=["openai", "ollama"])
def webui(request: pytest.FixtureRequest, server: ScriptedServer) -> Iterator[OpenWebUI]:
    apis = {
        "openai": {
            "ENABLE_OLLAMA_API": "false",
            "OPENAI_API_BASE_URL": f"{server.url}/v1",
            "OPENAI_API_KEY": KEY,
            "RAG_OPENAI_API_BASE_URL": f"{server.url}/v1",  # which OPENAI_API_BASE_URL is not for
            "RAG_OPENAI_API_KEY": KEY,
        },
        "ollama": {
            "ENABLE_OPENAI_API": "false",
            "OLLAMA_BASE_URL": server.url,
            "OLLAMA_API_CONFIGS": json.dumps({"0": {"key": KEY}}),
            "RAG_OLLAMA_API_KEY": KEY,
        },
    }
    documents = {
        "RAG_EMBEDDING_ENGINE": request.param,
        "RAG_EMBEDDING_MODEL": embedding_checkpoint("bert").name,
        "CHUNK_SIZE": "80",  # a passage
        "CHUNK_OVERLAP": "0",
    }
    with OpenWebUI(**apis[request.param], **documents) as running:
        yield running


@pytest.fixture
def model(webui: OpenWebUI) -> str:
    return str(webui.models()[0]["id"])


def test_the_model_is_listed_before_those_that_write_no_text(webui: OpenWebUI) -> None:
    first, *others = (row["id"].removesuffix(":latest") for row in webui.models())
    assert first == MODEL  # Ollama names each with its version
    assert set(others) <= {"bert-float32"}


def test_an_answer_streams(webui: OpenWebUI, model: str) -> None:
    said = " ".join(f"Gate {number} is open." for number in range(60))
    pieces = webui.streamed(model, _dictate(said))
    assert "".join(pieces) == said and len(pieces) > 1


def test_a_tool_is_run_and_the_next_turn_reads_only_what_is_new(
    webui: OpenWebUI, model: str, server: ScriptedServer
) -> None:
    webui.add_tool("gates", TOOL)
    told = _dictate(f"<think>\nLook.\n</think>\n\n{CALL}", "<think>\nAh.\n</think>\n\nIt is 7731.")
    first = webui.ask(model, told, tools=["gates"])
    answer = webui.answer(first)
    assert [row["type"] for row in answer["output"]] == [
        *("reasoning", "function_call", "function_call_output"),
        *("reasoning", "message"),
    ]
    assert _told(answer["output"][2]) == "The code of the north gate is 7731."
    assert answer["content"] == "It is 7731."
    second = webui.ask(model, _dictate("Still 7731."), after=first, tools=["gates"])
    assert webui.answer(second)["content"] == "Still 7731."
    last = [row for row in server.asked() if row.tools][-1]  # not a title's or tags'
    assert last.states == ["kept", "kept"]
    assert last.cached > 5_000 and last.prefilled < 200  # Open WebUI has tools of its own


def test_a_question_about_a_document_is_answered_with_its_passages(
    webui: OpenWebUI, model: str, server: ScriptedServer
) -> None:
    document = webui.add_document("wells.txt", "\n\n".join(PASSAGES))
    asked = webui.ask(model, _dictate("Of granite."), files=[_attached(document)])
    assert webui.answer(asked)["content"] == "Of granite."
    assert any(PASSAGES[1] in prompt for prompt in server.prompts())


def test_a_refusal_is_shown_in_the_servers_words(webui: OpenWebUI, model: str) -> None:
    asked = webui.ask(model, "word " * 200_000)
    assert "this server accepts 131,071" in json.dumps(webui.answer(asked)["error"])


def _dictate(*turns: str) -> str:
    return DICTATION + json.dumps(turns)


def _attached(document: dict[str, Any]) -> dict[str, Any]:
    """Return a document as the page attaches it to a question."""
    row = {"type": "file", "file": document, "status": "uploaded"}
    return row | {"id": document["id"], "name": document["filename"], "url": document["id"]}


def _told(output: dict[str, Any]) -> str:
    return "".join(part["text"] for part in output["output"])
