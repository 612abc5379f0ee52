"""No client can send a user's key elsewhere, or move a request: fields that LiteLLM acts on.

Each is sent at the top, in dictionaries, within messages and tools, as a header and in the query.
Nobody may connect to the address in them, and the cloud sees what it sees without them; or the
answer is a 400. All names that LiteLLM lists are tried in unit/proxy/gateway.
"""

from collections.abc import Iterator
from typing import Any, Final

import pytest
import yaml

from hearth.shared.paths import PROJECT_DIR
from tests.helpers.cloud.cloud_answers import HELLO
from tests.helpers.cloud.dialect_requests import PATHS, ask, body_of
from tests.helpers.cloud.gateway_server import GatewayServer, unvisited
from tests.helpers.servers.mock_cloud import CloudRequest

THEIRS: Final = "sk-theirs-0815"
CHATS: Final = list(PATHS)[:3]
everywhere = pytest.mark.parametrize(
    ("dialect", "model"),
    [
        *(
            pytest.param(dialect, model, marks=() if dialect == "messages" else pytest.mark.night)
            for dialect in CHATS
            for model in ("cloud", "claude-cloud")
        ),
        ("completions", "text-cloud"),
    ],
)
# Headers that differ from request to request, or that the transport writes.
VOLATILE: Final = {"content-length", "host", "x-request-id", "traceparent"}


@pytest.fixture(scope="module")
def attacks() -> Iterator[dict[str, Any]]:
    text = (PROJECT_DIR / "tests/data/litellm_attacks.yaml").read_text()
    with unvisited() as sink:
        yield yaml.safe_load(text.replace("SINK", sink).replace("THEIRS", THEIRS))


def seen(request: CloudRequest) -> tuple[str, str, Any, dict[str, str]]:
    """Return path, query, body and lasting headers of what a cloud has seen."""
    headers = {name: each for name, each in request.headers.items() if name not in VOLATILE}
    return request.path, request.query, request.json, headers


class Target:
    """One dialect before one model; `plain` is what its cloud sees of a request without tricks."""

    def __init__(self, gateway: GatewayServer, dialect: str, model: str) -> None:
        self.gateway, self.dialect, self.model = gateway, dialect, model
        (request,) = self.send()
        self.plain = seen(request)

    def send(self, more: Any = None, headers: Any = None, query: str = "") -> list[CloudRequest]:
        """Send a request; it is answered by the cloud, or a 400 that the cloud knows nothing of."""
        self.gateway.cloud.forget()
        body = body_of(self.dialect, self.model, "Hello there.") | (more or {})
        answer = ask(self.gateway.url, self.dialect, body, headers=headers, query=query)
        requests = self.gateway.cloud.generations()
        told = (400, "", 0) if answer.status == 400 else (200, HELLO.text, 1)
        assert (answer.status, answer.text, len(requests)) == told, answer.raw
        return requests

    def held(self, more: Any = None, headers: Any = None, query: str = "") -> bool:
        """Say whether the cloud saw what it sees without `more`; else the answer is a 400."""
        requests = self.send(more, headers, query)
        assert [seen(request) for request in requests] in ([], [self.plain])
        return bool(requests)

    def swept(self, fields: dict[str, Any]) -> set[str]:
        """Send all `fields` at once, and fewer where that is refused; return those refused."""
        if self.held(fields):
            return set()
        rows = list(fields.items())
        half = len(rows) // 2
        parts = (rows[:half], rows[half:]) if half else ()
        return set().union(*(self.swept(dict(part)) for part in parts)) if half else set(fields)


@pytest.fixture
def target(gateway: GatewayServer, dialect: str, model: str) -> Target:
    return Target(gateway, dialect, model)


@everywhere
def test_none_of_litellms_own_names_moves_a_request(target: Target, attacks: Any) -> None:
    refused = target.swept(attacks["fields"])
    assert len(refused) < 12, "most are left out, as unknown fields always were"
    for value in attacks["values"]:
        target.swept(dict.fromkeys([*attacks["fields"], *attacks["names"]], value))


@everywhere
def test_no_field_within_a_message_or_a_tool_moves_a_request(target: Target, attacks: Any) -> None:
    """Nor within a dictionary; what of `metadata` is the user's own may pass, in the body alone."""
    fields, dialect = attacks["fields"], target.dialect
    for place in ("extra_body", "extra_headers", "litellm_metadata"):
        target.held({place: fields})
    for request in target.send({"metadata": fields}):
        path, query, body, headers = seen(request)
        kept = {name: value for name, value in body.items() if name != "metadata"}
        assert (path, query, kept, headers) == target.plain
    if dialect == "completions":
        target.held({"messages": [fields], "tools": [fields]})
        return
    words = "input_text" if dialect == "responses" else "text"
    part = {"type": words, "text": "Hello there.", **fields}
    schema = {"type": "object", "properties": {}}
    tool: dict[str, Any] = {
        "chat": {"type": "function", "function": {"name": "f", "parameters": schema, **fields}},
        "messages": {"name": "f", "input_schema": schema},
        "responses": {"type": "function", "name": "f", "parameters": schema},
    }[dialect]
    field = "input" if dialect == "responses" else "messages"
    for more in (
        {field: [{"role": "user", "content": "Hello there.", **fields}]},
        {field: [{"role": "user", "content": [part]}]},
        {"tools": [{**tool, **fields}]},
    ):
        for request in target.send(more):
            told = f"{request.body.decode()} {request.headers}"
            assert THEIRS not in told and attacks["fields"]["webhook_url"] not in told


@everywhere
def test_no_header_and_no_query_moves_a_request(target: Target, attacks: Any) -> None:
    assert target.held(headers=attacks["headers"])
    for name, value in attacks["headers"].items():
        assert target.held(headers={name: value}), name
    for query in attacks["queries"]:
        target.held(query=query)


def test_a_models_name_cannot_name_a_provider(gateway: GatewayServer, attacks: Any) -> None:
    for name in attacks["models"]:
        for dialect in PATHS:
            answer = ask(gateway.url, dialect, body_of(dialect, name, "n=1"))
            assert answer.status in (200, 400, 404), answer.raw
            assert answer.status != 200 or answer.served_by == "hearth/local", (name, dialect)
    assert gateway.cloud.generations() == []


def test_a_fallback_does_not_carry_them_either(gateway: GatewayServer, attacks: Any) -> None:
    for dialect in CHATS:
        body, sent = body_of(dialect, "local-first", "n=2 full=0"), []
        for more, headers in (({}, {}), (attacks["fields"], attacks["headers"])):
            gateway.cloud.forget()
            answer = ask(gateway.url, dialect, {**more, **body}, headers=headers)
            sent.append([request.json for request in gateway.cloud.generations()])
            assert answer.text == HELLO.text or (more and answer.status == 400), answer.raw
        assert sent[1] in ([], sent[0])
