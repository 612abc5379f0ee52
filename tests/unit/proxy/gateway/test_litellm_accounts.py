"""Checks in LiteLLM's process what its callbacks, budgets and keys learn of local answers.

One process runs it for this file, with a user's config: two local deployments, one of them priced,
a logger of the user's own, and budgets. Who is told, whom a key may ask and what a spent
budget gets is tested at the real server (e2e/gateway: test_callbacks.py, test_virtual_keys.py).
"""

import asyncio
import json
import os
import time
from collections.abc import Coroutine, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, Final

import pytest

from hearth.proxy.gateway.litellm_messages import LocalAnswerLog
from hearth.proxy.gateway.litellm_process import LiteLLMConnection, LiteLLMProcess
from hearth.proxy.gateway.local_accounts import LiteLLMKeys
from hearth.proxy.gateway.routing_table import read_table
from hearth.proxy.request.session_id import api_key_digest
from hearth.shared.errors import RequestError
from hearth.shared.settings import load_settings
from hearth.shared.wire_messages import Usage

pytestmark = pytest.mark.process
CHAT: Final = "/v1/chat/completions"
CONFIG: Final = """
model_list:
  - model_name: small
    litellm_params: {model: hearth/small}
    model_info: {id: dep-small}
  - model_name: priced
    litellm_params:
      {model: hearth/priced, input_cost_per_token: 0.001, output_cost_per_token: 0.002}
    model_info: {id: dep-priced}
litellm_settings:
  callbacks: [own_logger.logger, own_logger.discreet]
router_settings:
  provider_budget_config:
    hearth: {budget_limit: 100, time_period: 1d}
    openai: {budget_limit: 100, time_period: 1d}
general_settings: {master_key: sk-master-9f2c11ab44}
"""
LOGGER: Final = """
import asyncio, importlib, json, os
from litellm.integrations.custom_logger import CustomLogger
from litellm.proxy import proxy_server
HERE = os.path.dirname(__file__)
class Logger(CustomLogger):
    def __init__(self, name, **options):
        super().__init__(**options)
        self.path = os.path.join(HERE, name)
    async def async_log_success_event(self, kwargs, response_obj, start_time, end_time):
        self.write("success", kwargs)
    async def async_log_failure_event(self, kwargs, response_obj, start_time, end_time):
        self.write("failure", kwargs)
    def write(self, kind, kwargs):
        row = {"kind": kind} | kwargs.get("standard_logging_object")
        with open(self.path, "a") as file:
            file.write(json.dumps(row, default=str) + chr(10))
logger = Logger("told")
discreet = Logger("discreet", turn_off_message_logging=True)

# What the test asks of LiteLLM itself, over a socket.
class Database:
    async def disconnect(self):
        pass
async def key(key, **fields):
    types = importlib.import_module("litellm.proxy._types")
    known = types.UserAPIKeyAuth(api_key=key, **fields)
    if proxy_server.prisma_client is None:
        proxy_server.prisma_client = Database()
        proxy_server.cost_tracking()  # as at its start, where it has a database
    await proxy_server.user_api_key_cache.async_set_cache(key=known.token, value=known)
async def budget(provider):
    for callback in importlib.import_module("litellm").callbacks:
        if type(callback).__name__ == "RouterBudgetLimiting":
            return await callback.dual_cache.async_get_cache(f"provider_spend:{provider}:1d")
async def spend(key):
    token = proxy_server.hash_token(key)
    return (await proxy_server.spend_counter_store.read(f"spend:key:{token}"))[0]
async def answer(reader, writer):
    asked = json.loads(await reader.readline())
    found = await globals()[asked.pop("do")](**asked)
    writer.write(json.dumps(found).encode())
    writer.close()
listening = asyncio.get_running_loop().create_task(
    asyncio.start_unix_server(answer, os.path.join(HERE, "test.sock"))
)
"""
USAGE: Final = {
    **{"prompt_tokens": 100, "cached_tokens": 60, "prefilled_tokens": 40},
    **{"completion_tokens": 7, "reasoning_tokens": 3},
}
ANSWER: Final[dict[str, Any]] = {
    **{"deployment_id": "dep-small", "group": "small", "model": "small", "dialect": "chat"},
    "body": {"model": "small", "messages": [{"role": "user", "content": "the words"}]},
    **{"stream": False, "usage": USAGE, "text": "the answer"},
    **{"asked_at": 1_700_000_000.0, "first_token_at": 1_700_000_001.5},
    "ended_at": 1_700_000_004.0,
}
PRICED: Final = {"deployment_id": "dep-priced", "group": "priced", "model": "priced"}
FAILED: Final = (503, "The queue is full.")


class Told:
    """LiteLLM's process, the loop that asks it, and what it has told its callbacks."""

    def __init__(self, directory: Path, runner: asyncio.Runner) -> None:
        settings = {"MODEL_PATH": "m/s", "PROXY_MODEL_ID": "small", "MODELS": "priced=m/p"}
        config = directory / "config.yaml"
        table = read_table(config, load_settings(settings, None), dict(os.environ), {})
        self.process = LiteLLMProcess(table, directory)
        self._keys = LiteLLMKeys(self.process)
        self._directory = directory
        self._runner = runner
        self.lines: dict[str, LiteLLMConnection] = {}

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self._runner.run(work)

    async def start(self) -> None:
        self.process.start(lambda usage: None)
        (await self.process.connect()).close()
        while not (self._directory / "test.sock").exists():
            await asyncio.sleep(0.01)

    def rows(self, request_id: str, name: str = "told") -> list[dict[str, Any]]:
        rows = map(json.loads, (self._directory / name).read_text().splitlines())
        return [row for row in rows if row["litellm_call_id"] == request_id]

    def log_of(self, request_id: str, **fields: Any) -> dict[str, Any]:
        """Have an answer logged and return LiteLLM's log of it, which must be one."""
        told = ANSWER | fields
        told["usage"] = told["usage"] and Usage(**told["usage"])
        line = self.lines.pop(request_id, None) or self.run(self.process.connect())
        with closing(line):
            self.run(line.ask("log", LocalAnswerLog(request_id=request_id, **told)))
        (row,) = self.rows(request_id)
        return row

    def do(self, what: str, **fields: Any) -> Any:
        """Do something with what LiteLLM itself keeps."""

        async def ask() -> Any:
            reader, writer = await asyncio.open_unix_connection(self._directory / "test.sock")
            writer.write(json.dumps({"do": what, **fields}).encode() + b"\n")
            found = json.loads(await reader.read())
            writer.close()
            return found

        return self.run(ask())

    def owner(self, headers: dict[str, str], path: str = CHAT, group: str = "") -> str:
        """Return the digest of whose a key is. Raises: RequestError."""
        rows = [(name.encode(), value.encode()) for name, value in headers.items()]
        found = self.run(self._keys.identity(rows, path, "POST", group))
        return api_key_digest({"x-api-key": found})

    def begin(self, name: str, key: str, group: str = "small", path: str = CHAT) -> None:
        """Have a local answer booked, until its log. Raises: RequestError."""
        asked = {"group": group, "dialect": "chat", "request_id": name}
        asked |= {"method": "POST", "path": path, "headers": [*bearer(key).items()]}
        line = self.run(self.process.connect())
        try:
            self.run(line.ask("begin", asked))
        except RequestError:
            line.close()
            raise
        self.lines[name] = line


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def refused(call: Any, *args: Any) -> tuple[int, str, str]:
    with pytest.raises(RequestError) as caught:
        call(*args)
    return caught.value.status, caught.value.code, str(caught.value)


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Told]:
    directory = tmp_path_factory.mktemp("litellm")
    (directory / "config.yaml").touch(0o600)
    (directory / "config.yaml").write_text(CONFIG)
    (directory / "own_logger.py").write_text(LOGGER)
    with asyncio.Runner() as runner:
        found = Told(directory, runner)
        runner.run(found.start())
        yield found
        for line in found.lines.values():
            line.close()
        runner.run(found.process.close())


ASKED: Final = {  # bodies in which `ask` must be told, and `be brief` where it stands
    "chat": {"messages": [{"role": "user", "content": "ask"}]},
    "completions": {"prompt": "ask"},
    "messages": {"messages": [{"role": "user", "content": "ask"}], "system": "be brief"},
    "responses": {"input": "ask", "instructions": "of no message"},
}


@pytest.mark.parametrize("dialect", ASKED)
def test_a_log_has_what_was_asked_and_answered_with_its_own_times(told: Told, dialect: str) -> None:
    """A logger that wants no messages gets counts alone."""
    for stream in (False, True):
        name, call = f"asked-{dialect}-{stream}", {"name": "read", "arguments": '{"path": "a"}'}
        answer = {"thinking": "hm", "calls": [{"id": "c1", **call}], "finish_reason": "tool_calls"}
        log = told.log_of(name, dialect=dialect, stream=stream, body=ASKED[dialect], **answer)
        assert (log["kind"], log["status"], log["response_cost"]) == ("success", "success", 0)
        details = log["metadata"]["usage_object"]["completion_tokens_details"]
        assert details["reasoning_tokens"] == 3
        about = (log["model"], log["model_id"], bool(log["stream"]))
        assert about == ("hearth/small", "dep-small", stream)
        said = json.dumps(log["response"])
        parts = ("the answer", "hm", "read", "path")[: 1 if dialect == "completions" else 4]
        assert all(part in said for part in parts)
        assert "ask" in json.dumps(log["messages"])
        assert ("be brief" in json.dumps(log["messages"])) == (dialect == "messages")
        times = (log["startTime"], log["completionStartTime"], log["endTime"])
        assert times == (ANSWER["asked_at"], ANSWER["first_token_at"], ANSWER["ended_at"])
        (row,) = told.rows(name, "discreet")
        assert row["prompt_tokens"] == 100
        assert not any(part in json.dumps(row) for part in ("the answer", '"hm"', "be brief"))


@pytest.mark.parametrize(("dialect", "cost"), [("embeddings", 0.04), ("rerank", 0)])
def test_what_was_embedded_or_ranked_is_told_in_tokens(
    told: Told, dialect: str, cost: float
) -> None:
    """LiteLLM has prices of rankings by the search only, and none of a deployment's tokens."""
    usage = {"prompt_tokens": 40, "cached_tokens": 0, "prefilled_tokens": 40}
    fields = PRICED | {"text": "", "dialect": dialect, "body": {"input": ["x"], "query": "x"}}
    fields |= {"usage": usage | {"completion_tokens": 0}, "first_token_at": None}
    log = told.log_of(f"{dialect}-1", **fields)
    assert (log["kind"], log["prompt_tokens"], log["completion_tokens"]) == ("success", 40, 0)
    assert log["response_cost"] == pytest.approx(cost)


def test_an_answer_that_failed_is_told_once_as_a_failure(told: Told) -> None:
    for usage in (None, USAGE):
        log = told.log_of(f"failed-{usage is None}", error=FAILED, usage=usage)
        assert (log["kind"], log["status"]) == ("failure", "failure")
        assert "The queue is full." in log["error_str"]
        assert log["error_information"]["error_code"] == "503"
        assert log["prompt_tokens"] == (100 if usage else 0)


def test_a_price_of_the_users_goes_to_the_providers_budget(told: Told) -> None:
    before = told.do("budget", provider="hearth")
    log = told.log_of("priced", **PRICED)
    assert log["response_cost"] == pytest.approx(0.114)  # 100 of 0.001 and 7 of 0.002
    told.log_of("free")
    assert told.do("budget", provider="hearth") == pytest.approx(before + 0.114)


# ---------------------------------------------------------------- keys


def test_the_owner_is_the_digest_of_the_key_that_litellm_checked(told: Told) -> None:
    """Whatever else is sent beside it; and a key that may chat reads no models and no cache."""
    told.do("key", key="sk-mine")
    mine = api_key_digest({"x-api-key": "sk-mine"})
    beside = {"x-api-key": "garbage", "x-session-id": "sk-theirs"}
    for headers in ({"x-api-key": "sk-mine"}, bearer("sk-mine"), bearer("sk-mine") | beside):
        assert told.owner(headers, "/v1/sessions/s") == told.owner(headers) == mine
    told.do("key", key="sk-chat", allowed_routes=[CHAT])
    for path in (CHAT, "/v1/cache/prefill"):
        assert told.owner(bearer("sk-chat"), path)
    for path in ("/v1/messages", "/v1/models", "/v1/cache"):
        assert refused(told.owner, bearer("sk-chat"), path)[0] == 403


def test_a_keys_requests_are_counted_and_a_log_says_whose_each_was_by_its_digest(
    told: Told,
) -> None:
    told.do("key", key="sk-limited", key_alias="agent one", rpm_limit=2)
    for name in ("l1", "l2"):
        told.begin(name, "sk-limited")
    status, code, text = refused(told.begin, "l3", "sk-limited")
    assert (status, code) == (429, "rate_limit_exceeded") and "Current limit: 2" in text
    about = told.log_of("l1")["metadata"]
    assert about["user_api_key_alias"] == "agent one"
    assert about["user_api_key_hash"].startswith(api_key_digest({"x-api-key": "sk-limited"}))
    assert "sk-limited" not in json.dumps(told.rows("l1"))


@pytest.mark.parametrize("end", ["success", "failure", "leave"])
def test_a_keys_place_among_parallel_requests_is_free_again_at_the_end(
    told: Told, end: str
) -> None:
    key = f"sk-parallel-{end}"
    told.do("key", key=key, max_parallel_requests=1)
    deadline = time.monotonic() + 20
    for name in (f"{key}-{turn}" for turn in range(3)):
        while name not in told.lines:
            try:
                told.begin(name, key)
            except RequestError as error:  # that it has left is known a little later
                assert error.status == 429 and end == "leave" and time.monotonic() < deadline
        assert refused(told.begin, "x", key)[0] == 429
        if end == "leave":
            told.lines.pop(name).close()
        else:
            told.log_of(name, error=(499, "Its client left.") if end == "failure" else None)


@pytest.mark.parametrize("path", ["chat/completions", "completions", "messages", "responses"])
def test_a_budget_is_spent_by_answers_and_given_back_where_one_failed(
    told: Told, path: str
) -> None:
    key = f"sk-reserved-{path}"
    told.do("key", key=key, max_budget=5.0, spend=0.0)
    assert told.owner(bearer(key), "/v1/messages/count_tokens", "priced")
    assert not told.do("spend", key=key), "a question reserves nothing"
    for name, end in (("a", {}), ("b", {"error": FAILED, "usage": None})):
        told.begin(key + name, key, "priced", f"/v1/{path}")
        assert told.do("spend", key=key) > (0.114 if end else 0)
        told.log_of(key + name, **PRICED, **end)
        assert told.do("spend", key=key) == pytest.approx(0.114)
