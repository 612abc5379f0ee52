"""Checks against LiteLLM itself what its callbacks, budgets and keys learn of local answers.

One process runs it for this file, with a user's config: two local deployments, one of them priced,
a cloud's, a logger of the user's own, a sink of LiteLLM's generic_api, and budgets.
"""

import http.server
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from hearth.proxy.api.responses.response_store import ResponseStore
from hearth.proxy.request.session_id import key_digest
from hearth.shared.errors import RequestError
from tests.helpers.servers.litellm_child import LiteLLMChild, Refused

pytestmark = pytest.mark.process

CONFIG: Final = """
model_list:
  - model_name: small
    litellm_params: {model: hearth/small}
    model_info: {id: dep-small}
  - model_name: priced
    litellm_params:
      {model: hearth/priced, input_cost_per_token: 0.001, output_cost_per_token: 0.002}
    model_info: {id: dep-priced}
  - model_name: cloud
    litellm_params: {model: openai/gpt-4o, api_key: sk-a-secret, mock_response: hello there}
    model_info: {id: dep-cloud}
litellm_settings:
  custom_provider_map: [{provider: hearth, custom_handler: own_logger.handler}]
  callbacks: [own_logger.logger, own_logger.discreet, sink]
router_settings:
  provider_budget_config:
    hearth: {budget_limit: 100, time_period: 1d}
    openai: {budget_limit: 100, time_period: 1d}
general_settings: {master_key: sk-master-9f2c11ab44}
callback_settings:
  sink: {callback_type: generic_api, endpoint: "http://127.0.0.1:PORT/", headers: {x-from: hearth}}
"""
LOGGER: Final = """
import json, os
from litellm import CustomLLM
from litellm.integrations.custom_logger import CustomLogger
class Logger(CustomLogger):
    def __init__(self, name, **options):
        super().__init__(**options)
        self.path = os.path.join(os.path.dirname(__file__), name)
    async def async_log_success_event(self, kwargs, response_obj, start_time, end_time):
        self.write("success", kwargs, start_time, end_time)
    async def async_log_failure_event(self, kwargs, response_obj, start_time, end_time):
        self.write("failure", kwargs, start_time, end_time)
    def write(self, kind, kwargs, start, end):
        row = {"kind": kind, "start": start.timestamp(), "end": end.timestamp()}
        row["log"] = kwargs.get("standard_logging_object")
        with open(self.path, "a") as file:
            file.write(json.dumps(row, default=str) + chr(10))
logger = Logger("told")
discreet = Logger("discreet", turn_off_message_logging=True)
handler = CustomLLM()
"""
USAGE: Final = {
    "prompt_tokens": 100,
    "cached_tokens": 60,
    "prefilled_tokens": 40,
    "completion_tokens": 7,
    "reasoning_tokens": 3,
}
ANSWER: Final[dict[str, Any]] = {
    "deployment_id": "dep-small",
    "group": "small",
    "model": "small",
    "dialect": "chat",
    "body": {"model": "small", "messages": [{"role": "user", "content": "the words"}]},
    "stream": False,
    "asked_at": 1_700_000_000.0,
    "first_token_at": 1_700_000_001.5,
    "ended_at": 1_700_000_004.0,
    "usage": USAGE,
    "text": "the answer",
}
MASTER: Final = "sk-master-9f2c11ab44"


class Sink(http.server.BaseHTTPRequestHandler):
    """Stands for a log server: keeps the rows that it is posted."""

    rows: Final[list[dict[str, Any]]] = []

    def do_POST(self) -> None:
        self.rows.extend(json.loads(self.rfile.read(int(self.headers["content-length"]))))
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""


class Told:
    """LiteLLM's process, and what it has told its callbacks."""

    def __init__(self, directory: Path, child: LiteLLMChild) -> None:
        self._directory = directory
        self.child = child

    def rows(self, request_id: str, name: str = "told") -> list[dict[str, Any]]:
        path = self._directory / name
        rows = map(json.loads, path.read_text().splitlines()) if path.exists() else ()
        return [row for row in rows if row["log"]["litellm_call_id"] == request_id]

    def log_of(self, request_id: str, **fields: Any) -> dict[str, Any]:
        """Have an answer logged and return LiteLLM's log of it, which must be one."""
        self.child.ask("log", request_id=request_id, **(ANSWER | fields))
        (row,) = self.rows(request_id)
        log: dict[str, Any] = row["log"] | {"kind": row["kind"]}
        return log


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Told]:
    directory = tmp_path_factory.mktemp("litellm")
    server = http.server.HTTPServer(("127.0.0.1", 0), Sink)
    config = CONFIG.replace("PORT", str(server.server_port))
    (directory / "config.yaml").write_text(config)
    (directory / "own_logger.py").write_text(LOGGER)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    child = LiteLLMChild(directory / "config.yaml", DEFAULT_FLUSH_INTERVAL_SECONDS="1")
    try:
        yield Told(directory, child)
    finally:
        child.close()
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("dialect", ["chat", "completions", "messages", "responses"])
def test_a_callback_is_told_once_what_usage_says(told: Told, dialect: str, stream: bool) -> None:
    log = told.log_of(f"usage-{dialect}-{stream}", dialect=dialect, stream=stream)
    assert (log["kind"], log["status"], log["response_cost"]) == ("success", "success", 0)
    assert (log["prompt_tokens"], log["completion_tokens"], log["total_tokens"]) == (100, 7, 107)
    usage = log["metadata"]["usage_object"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == 60
    assert usage["completion_tokens_details"]["reasoning_tokens"] == 3
    assert (log["model"], log["model_group"], log["model_id"]) == (
        "hearth/small",
        "small",
        "dep-small",
    )
    assert (log["custom_llm_provider"], bool(log["stream"])) == ("hearth", stream)
    assert "the answer" in json.dumps(log["response"])


@pytest.mark.parametrize("stream", [False, True])
def test_times_are_those_of_the_answer_and_not_of_its_log(told: Told, stream: bool) -> None:
    log = told.log_of(f"times-{stream}", stream=stream)
    assert (log["startTime"], log["endTime"]) == (ANSWER["asked_at"], ANSWER["ended_at"])
    assert log["completionStartTime"] == ANSWER["first_token_at"]
    (row,) = told.rows(f"times-{stream}")
    assert (row["start"], row["end"]) == (ANSWER["asked_at"], ANSWER["ended_at"])


@pytest.mark.parametrize(
    ("dialect", "body"),
    [
        ("chat", {"messages": [{"role": "user", "content": "ask"}]}),
        ("completions", {"prompt": "ask"}),
        ("messages", {"messages": [{"role": "user", "content": "ask"}], "system": "be brief"}),
        ("responses", {"input": "ask", "instructions": "be brief"}),
        ("responses", {"input": [{"type": "message", "role": "user", "content": "ask"}]}),
    ],
)
def test_what_was_asked_is_told_as_the_client_sent_it(
    told: Told, dialect: str, body: dict[str, Any]
) -> None:
    request_id = f"asked-{dialect}-{len(json.dumps(body))}"
    log = told.log_of(request_id, dialect=dialect, body=body)
    assert "ask" in json.dumps(log["messages"])
    assert ("be brief" in json.dumps(log["messages"])) == ("system" in body)


@pytest.mark.parametrize(("dialect", "cost"), [("embeddings", 0.04), ("rerank", 0)])
def test_what_was_embedded_or_ranked_is_told_in_tokens(
    told: Told, dialect: str, cost: float
) -> None:
    """LiteLLM has prices of rankings by the search only, and none of a deployment's tokens."""
    usage = {"prompt_tokens": 40, "cached_tokens": 0, "prefilled_tokens": 40}
    fields = {"deployment_id": "dep-priced", "group": "priced", "model": "priced", "text": ""}
    fields |= {"dialect": dialect, "body": {"input": ["the words"], "query": "the words"}}
    usage |= {"completion_tokens": 0}
    log = told.log_of(f"{dialect}-1", **fields, usage=usage, first_token_at=None)
    assert (log["kind"], log["prompt_tokens"], log["completion_tokens"]) == ("success", 40, 0)
    assert log["response_cost"] == pytest.approx(cost)


def test_thinking_and_tool_calls_are_told(told: Told) -> None:
    calls = [{"id": "c1", "name": "read", "arguments": '{"path": "a"}'}]
    log = told.log_of("calls", text="", thinking="hm", calls=calls, finish_reason="tool_calls")
    (choice,) = log["response"]["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["reasoning_content"] == "hm"
    (call,) = choice["message"]["tool_calls"]
    assert call["function"] == {"name": "read", "arguments": '{"path": "a"}'}


def test_a_logger_that_wants_no_messages_gets_counts_alone(told: Told) -> None:
    told.log_of("discreet")
    (row,) = told.rows("discreet", "discreet")
    assert row["log"]["prompt_tokens"] == 100
    assert "the words" not in json.dumps(row) and "the answer" not in json.dumps(row)


@pytest.mark.parametrize("usage", [None, USAGE])
def test_an_answer_that_failed_is_told_once_as_a_failure(
    told: Told, usage: dict[str, Any] | None
) -> None:
    error = {"text": "The queue is full.", "status": 503}
    log = told.log_of(f"failed-{usage is None}", error=error, usage=usage)
    assert (log["kind"], log["status"]) == ("failure", "failure")
    assert "The queue is full." in log["error_str"]
    assert log["error_information"]["error_code"] == "503"
    assert log["prompt_tokens"] == (100 if usage else 0)


def test_a_price_of_the_users_goes_to_the_providers_budget(told: Told) -> None:
    before = told.child.ask("budget", provider="hearth")
    log = told.log_of("priced", deployment_id="dep-priced", group="priced", model="priced")
    assert log["response_cost"] == pytest.approx(0.114)  # 100 of 0.001 and 7 of 0.002
    told.log_of("free")
    assert told.child.ask("budget", provider="hearth") == pytest.approx(before + 0.114)


def test_a_log_server_gets_every_answer(told: Told) -> None:
    told.log_of("sink")
    deadline = time.monotonic() + 20
    while not (found := [row for row in Sink.rows if row["litellm_call_id"] == "sink"]):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    (row,) = found
    assert (row["prompt_tokens"], row["completion_tokens"]) == (100, 7)


def test_a_deployment_that_the_router_does_not_know_is_logged_all_the_same(told: Told) -> None:
    log = told.log_of("unknown", deployment_id="no-such", group="other", model="other")
    assert (log["model_id"], log["response_cost"]) == ("no-such", 0)


def test_what_a_cloud_call_cost_is_told_with_our_request_id(told: Told) -> None:
    whole = told.child.ask("cloud", model="cloud", request_id="q1", stream=False)
    streamed = told.child.ask("cloud", model="cloud", request_id="q2", stream=True)
    told.log_of("not-ours")  # of a call without our header nothing is told
    first, second = told.child.ask("told", count=2)
    for usage, row, request_id in ((whole, first, "q1"), (streamed, second, "q2")):
        assert (row["request_id"], row["deployment_id"]) == (request_id, "dep-cloud")
        assert row["prompt_tokens"] == usage["prompt_tokens"] > 0
        assert row["completion_tokens"] == usage["completion_tokens"] > 0
        assert row["cost"] > 0


# ---------------------------------------------------------------- keys


def caller(key: str = "", header: str = "authorization", **fields: Any) -> dict[str, Any]:
    value = f"Bearer {key}" if header == "authorization" else key
    return {"headers": {header: value} if key else {}, **fields}


def refused(told: Told, what: str, **fields: Any) -> tuple[int, str, str]:
    with pytest.raises(Refused) as caught:
        told.child.ask(what, **fields)
    status, code, text = caught.value.args
    return status, code, text


@pytest.mark.parametrize("header", ["authorization", "x-api-key"])
def test_the_master_key_is_an_admins_in_each_header(told: Told, header: str) -> None:
    found = told.child.ask("owner", caller=caller(MASTER, header))
    assert found["digest"]


@pytest.mark.parametrize("key", ["", "sk-wrong", "wrong"])
def test_a_key_that_is_none_is_a_401_that_names_no_database(told: Told, key: str) -> None:
    status, code, text = refused(told, "owner", caller=caller(key))
    assert (status, code) == (401, "invalid_api_key")
    assert "prisma" not in text and "Authorization: Bearer KEY" in text


@pytest.mark.parametrize("header", ["authorization", "x-api-key"])
def test_the_owner_is_the_digest_of_the_virtual_key(told: Told, header: str) -> None:
    told.child.ask("key", key="sk-owner-one")
    told.child.ask("key", key="sk-owner-two")
    one = told.child.ask("owner", caller=caller("sk-owner-one", header))
    two = told.child.ask("owner", caller=caller("sk-owner-two", header))
    assert one == {"digest": key_digest({"x-api-key": "sk-owner-one"})}
    assert one["digest"] != two["digest"]


def test_a_second_header_makes_nobody_another_keys_owner(told: Told) -> None:
    """The owner is the key that LiteLLM checked, whatever else is sent beside it."""
    told.child.ask("key", key="sk-mine")
    told.child.ask("key", key="sk-theirs")
    mine = key_digest({"x-api-key": "sk-mine"})
    both = {"authorization": "Bearer sk-mine", "x-api-key": "garbage", "x-session-id": "sk-theirs"}
    assert told.child.ask("owner", caller={"headers": both})["digest"] == mine


OWN_ROUTES = ("/v1/cache", "/v1/sessions/s", "/metrics", "/dashboard/events", "/v1/doctor")


@pytest.mark.parametrize("path", [*OWN_ROUTES, "/v1/models", "/v1/responses/resp_1"])
def test_a_virtual_key_is_known_on_our_own_routes_too(told: Told, path: str) -> None:
    told.child.ask("key", key="sk-routes")
    found = told.child.ask("owner", caller=caller("sk-routes", path=path))
    assert found["digest"] == key_digest({"x-api-key": "sk-routes"})
    assert refused(told, "owner", caller=caller("", path=path))[0] == 401


def test_a_key_that_may_chat_only_reads_no_models_and_no_cache(told: Told) -> None:
    told.child.ask("key", key="sk-chat", allowed_routes=["/v1/chat/completions"])
    for path in ("/v1/chat/completions", "/v1/cache/prefill"):
        assert told.child.ask("owner", caller=caller("sk-chat", path=path))
    for path in ("/v1/messages", "/v1/models", "/v1/cache"):
        assert refused(told, "owner", caller=caller("sk-chat", path=path))[0] == 403


def test_a_key_may_ask_for_its_own_models_only(told: Told) -> None:
    told.child.ask("key", key="sk-small", models=["small"])
    assert told.child.ask("begin", name="m1", caller=caller("sk-small"), group="small")
    status, _, text = refused(told, "begin", name="m2", caller=caller("sk-small"), group="priced")
    assert status == 403 and "priced" in text


def test_a_question_whether_a_key_may_ask_reserves_nothing(told: Told) -> None:
    told.child.ask("key", key="sk-asking", models=["priced"], max_budget=0.2, spend=0.0)
    asking = caller("sk-asking", path="/v1/messages/count_tokens", tokens_max=1_000)
    for path in ("/v1/messages/count_tokens", "/v1/responses/input_tokens", "/v1/cache/prefill"):
        assert told.child.ask("owner", caller=asking | {"path": path}, group="priced")
        refusal = refused(told, "owner", caller=asking | {"path": path}, group="small")
        assert refusal[0] == 403 and "small" in refusal[2]
    assert not told.child.ask("spend", key="sk-asking")


def test_a_keys_requests_a_minute_are_counted_and_the_next_is_a_429(told: Told) -> None:
    told.child.ask("key", key="sk-limited", rpm_limit=2)
    for name in ("l1", "l2"):
        told.child.ask("begin", name=name, caller=caller("sk-limited"), group="small")
    status, code, text = refused(
        told, "begin", name="l3", caller=caller("sk-limited"), group="small"
    )
    assert (status, code) == (429, "rate_limit_exceeded") and "Current limit: 2" in text


@pytest.mark.parametrize("end", ["success", "failure"])
def test_a_keys_place_among_parallel_requests_is_free_again_at_the_end(
    told: Told, end: str
) -> None:
    key = f"sk-parallel-{end}"
    told.child.ask("key", key=key, max_parallel_requests=1)
    error = {"text": "Its client left.", "status": 499} if end == "failure" else None
    for turn in range(3):
        name = f"{key}-{turn}"
        told.child.ask("begin", name=name, caller=caller(key), group="small")
        assert refused(told, "begin", name="x", caller=caller(key), group="small")[0] == 429
        told.log_of(name, call=name, error=error)


def test_a_key_whose_budget_is_spent_is_refused(told: Told) -> None:
    told.child.ask("key", key="sk-budget", max_budget=0.2, spend=0.0)
    fields = {"deployment_id": "dep-priced", "group": "priced", "model": "priced"}
    for name in ("b1", "b2"):  # 0.114 each
        asking = caller("sk-budget", tokens_max=7)
        told.child.ask("begin", name=name, caller=asking, group="priced")
        told.log_of(name, call=name, **fields)
    assert told.child.ask("spend", key="sk-budget") == pytest.approx(0.228)
    status, _, text = refused(told, "begin", name="b3", caller=caller("sk-budget"), group="priced")
    assert status == 422 and "Budget has been exceeded" in text


@pytest.mark.parametrize("path", ["chat/completions", "completions", "messages", "responses"])
def test_what_a_budget_had_reserved_is_given_back_where_the_answer_failed(
    told: Told, path: str
) -> None:
    path, name = f"/v1/{path}", f"reserved-{path}"
    told.child.ask("key", key="sk-reserved", max_budget=5.0, spend=0.0)
    asking = caller("sk-reserved", tokens_max=1_000, path=path)
    told.child.ask("begin", name=name, caller=asking, group="priced")
    assert told.child.ask("spend", key="sk-reserved") >= 2.0  # 1,000 of 0.002
    error = {"text": "The queue is full.", "status": 503}
    fields = {"deployment_id": "dep-priced", "group": "priced", "model": "priced"}
    told.log_of(name, call=name, error=error, usage=None, **fields)
    assert told.child.ask("spend", key="sk-reserved") == pytest.approx(0)


def test_what_one_virtual_key_keeps_the_other_does_not_find(told: Told) -> None:
    """The owner that LiteLLM names is what cache, turns, responses and rows are kept under."""
    for key in ("sk-a", "sk-b"):
        told.child.ask("key", key=key)
    a, b = (told.child.ask("owner", caller=caller(key))["digest"] for key in ("sk-a", "sk-b"))
    assert a and b and a != b
    stored = ResponseStore()
    stored.keep(a, {"input": "the words"}, {"id": "resp_1", "output": []})
    assert stored.response(a, "resp_1")["id"] == "resp_1"
    for refers in (
        lambda: stored.response(b, "resp_1"),
        lambda: stored.delete(b, "resp_1"),
        lambda: stored.expanded(b, {"input": "x", "previous_response_id": "resp_1"}),
    ):
        with pytest.raises(RequestError) as caught:
            refers()
        assert caught.value.status in (400, 404)


def test_a_log_says_whose_the_answer_was_by_its_keys_digest(told: Told) -> None:
    told.child.ask("key", key="sk-whose", key_alias="agent one")
    told.child.ask("begin", name="w1", caller=caller("sk-whose"), group="small")
    log = told.log_of("w1", call="w1")
    assert log["metadata"]["user_api_key_alias"] == "agent one"
    assert log["metadata"]["user_api_key_hash"].startswith(key_digest({"x-api-key": "sk-whose"}))
    assert "sk-whose" not in json.dumps(told.rows("w1"))
