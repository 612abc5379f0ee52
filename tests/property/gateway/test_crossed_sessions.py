"""Sessions that go over to the cloud and back, before a cloud that takes back only its own.

The cloud refuses thinking, seals and ids that it did not make or that were changed, and what its
API calls malformed. The client echoes what it was given, as clients of each API do.
"""

import itertools
import re
import secrets
import uuid
from dataclasses import dataclass, field
from typing import Any

import orjson
from hypothesis import given, settings, strategies as st

from hearth.proxy.api import chat_completions
from hearth.proxy.api.messages import messages_request
from hearth.proxy.api.responses import responses_request
from hearth.proxy.api.responses.response_store import ResponseStore
from hearth.proxy.gateway.cloud.cloud_bodies import CloudDialect, cloud_body
from hearth.proxy.gateway.cloud.crossing import for_cloud
from hearth.shared.our_ids import SIGNATURE_BEGIN, new_id

CALL_ID = re.compile(r"[a-zA-Z0-9_-]{1,40}")
Row = dict[str, Any]


@dataclass(frozen=True)
class Turn:
    """What one answer holds, and where it is asked for."""

    in_cloud: bool
    thinks: bool
    says: bool
    calls: int

    @property
    def is_empty(self) -> bool:
        return not (self.says or self.calls)


TURNS = st.builds(Turn, st.booleans(), st.booleans(), st.booleans(), st.integers(0, 2))


def crossings(turns: list[Turn]) -> int:
    return sum(one.in_cloud != other.in_cloud for one, other in itertools.pairwise(turns))


SESSIONS = st.lists(TURNS, min_size=6, max_size=6).filter(lambda turns: crossings(turns) >= 2)


class Refused(AssertionError):
    """The cloud answers 400."""


@dataclass
class Cloud:
    """Remembers what it gave, as a provider's keys do, and takes back nothing else."""

    made: set[bytes] = field(default_factory=set)
    ids: set[str] = field(default_factory=set)
    met: list[Row] = field(default_factory=list)  # of what it was given back

    def give(self, row: Row) -> Row:
        """Note a row as its own; its id may be asked for too."""
        self.made.add(_octets(row))
        if "id" in row:
            self.ids.add(row["id"])
        return row

    def take(self, row: Row) -> None:
        """Take an opaque row back, which must be as it was given."""
        if _octets(row) not in self.made:
            raise Refused(f"not mine: {row}")
        self.met.append(row)

    def require(self, is_valid: object, why: object) -> None:
        if not is_valid:
            raise Refused(why)


def _octets(row: Row) -> bytes:
    return orjson.dumps(row, option=orjson.OPT_SORT_KEYS)


def _sealed() -> str:
    return "Eq" + secrets.token_urlsafe(90)


# ---------------------------------------------------------------- Messages


class Messages:
    """A client of Messages, and how each side answers it."""

    dialect: CloudDialect = "messages"

    def __init__(self, cloud: Cloud) -> None:
        self.cloud = cloud
        self.rows: list[Row] = [{"role": "user", "content": "begin"}]
        self.opaque: list[Row] = []  # of the cloud, so far

    def body(self) -> Row:
        thinking = {"type": "enabled", "budget_tokens": 1_024}
        edits = [{"type": "clear_thinking_20251015", "keep": "all"}]
        return {
            "messages": self.rows,
            "max_tokens": 9_999,
            "thinking": thinking,
            "context_management": {"edits": edits},
        }

    def sent(self) -> Row:
        return cloud_body("messages", for_cloud("messages", self.body()), "g")

    def read_here(self) -> None:
        assert messages_request.parse(self.body()).prompt.messages

    def verify(self, body: Row) -> None:
        cloud, rows = self.cloud, body["messages"]
        cloud.require(rows and rows[0]["role"] == "user", "the first is not the user's")
        for before, row in itertools.pairwise([{"content": []}, *rows]):
            content = row["content"]
            cloud.require(content, "empty content")
            for block in content if type(content) is list else []:
                self._verify_block(block, before)
        last = next((row for row in reversed(rows) if row["role"] == "assistant"), None)
        kinds = [block["type"] for block in last["content"]] if last else []
        if "thinking" in body and "tool_use" in kinds:
            cloud.require(kinds[0] in ("thinking", "redacted_thinking"), "thinking must come first")
        clears = body.get("context_management", {}).get("edits", [])
        cloud.require("thinking" in body or not clears, "clear_thinking needs thinking")

    def _verify_block(self, block: Row, before: Row) -> None:
        kind = block["type"]
        if kind in ("thinking", "redacted_thinking"):
            self.cloud.take(block)
        elif kind == "text":
            self.cloud.require(block["text"].strip(), "empty text")
        elif kind == "tool_use":
            self.cloud.require(CALL_ID.fullmatch(block["id"]), "id of a call")
        elif kind == "tool_result":
            ids = [each.get("id") for each in before["content"] if type(each) is dict]
            self.cloud.require(block["tool_use_id"] in ids, "a result without its call")

    def answer(self, turn: Turn) -> None:
        blocks: list[Row] = []
        if turn.thinks and turn.in_cloud:
            blocks += [
                {"type": "thinking", "thinking": "deep", "signature": _sealed()},
                {"type": "redacted_thinking", "data": _sealed()},
            ]
            self.opaque += [self.cloud.give(block) for block in blocks]
        elif turn.thinks:
            signature = SIGNATURE_BEGIN + new_id()
            blocks.append({"type": "thinking", "thinking": "hm", "signature": signature})
        if turn.says or turn.is_empty:
            blocks.append({"type": "text", "text": "said" if turn.says else ""})
        calls = [f"toolu_{new_id()}" if turn.in_cloud else new_id() for _ in range(turn.calls)]
        blocks += [{"type": "tool_use", "id": each, "name": "f", "input": {}} for each in calls]
        self.rows.append({"role": "assistant", "content": blocks})
        results = [{"type": "tool_result", "tool_use_id": each, "content": "x"} for each in calls]
        self.rows.append({"role": "user", "content": results or "more"})


# ---------------------------------------------------------------- chat


class Chat:
    """A client of chat completions that sends back all that a turn had."""

    dialect: CloudDialect = "chat"

    def __init__(self, cloud: Cloud) -> None:
        self.cloud = cloud
        self.rows: list[Row] = [{"role": "user", "content": "begin"}]
        self.opaque: list[Row] = []
        self.calls: set[str] = set()  # that the cloud made

    def body(self) -> Row:
        return {"messages": self.rows}

    def sent(self) -> Row:
        return cloud_body("chat", for_cloud("chat", self.body()), "g")

    def read_here(self) -> None:
        assert chat_completions.parse(self.body()).prompt.messages

    def verify(self, body: Row) -> None:
        open_calls: set[str] = set()
        for row in body["messages"]:
            if row["role"] == "tool":
                self.cloud.require(row["tool_call_id"] in open_calls, "a result without its call")
                continue
            if row["role"] == "assistant":
                open_calls = {call["id"] for call in row.get("tool_calls", ())}
                self._verify_turn(row, open_calls)

    def _verify_turn(self, row: Row, calls: set[str]) -> None:
        cloud = self.cloud
        cloud.require(all(CALL_ID.fullmatch(each) for each in calls), "id of a call")
        cloud.require(row["content"] is not None or calls, "neither content nor calls")
        cloud.require("reasoning" not in row, "unknown field")
        if "reasoning_content" in row:
            cloud.require(calls and calls <= self.calls, "reasoning that is not mine")
        for block in row.get("thinking_blocks", ()):
            cloud.take(block)

    def answer(self, turn: Turn) -> None:
        row: Row = {"role": "assistant", "content": "said" if turn.says else None}
        if turn.is_empty:
            row["content"] = ""
        if turn.thinks:
            row["reasoning_content"] = row["reasoning"] = "hm"
        if turn.thinks and turn.in_cloud:
            row["thinking_blocks"] = [
                {"type": "thinking", "thinking": "hm", "signature": _sealed()}
            ]
            self.opaque += [self.cloud.give(block) for block in row["thinking_blocks"]]
        calls = [f"call_{new_id()}" if turn.in_cloud else new_id() for _ in range(turn.calls)]
        if turn.in_cloud:
            self.calls |= set(calls)
        called = {"type": "function", "function": {"name": "f", "arguments": "{}"}}
        if calls:
            row["tool_calls"] = [called | {"id": each} for each in calls]
        self.rows.append(row)
        self.rows += [{"role": "tool", "tool_call_id": each, "content": "x"} for each in calls]
        if not calls:
            self.rows.append({"role": "user", "content": "more"})


# ---------------------------------------------------------------- Responses


class Responses:
    """A client of Responses that sends its whole history, its items as it was given them."""

    dialect: CloudDialect = "responses"

    def __init__(self, cloud: Cloud) -> None:
        self.cloud = cloud
        self.rows: list[Row] = [{"type": "message", "role": "user", "content": "begin"}]
        self.opaque: list[Row] = []

    def body(self) -> Row:
        return {"input": self.rows}

    def sent(self) -> Row:
        return cloud_body("responses", for_cloud("responses", self.body()), "g")

    def read_here(self) -> None:
        assert responses_request.parse(self.body()).prompt.messages

    def verify(self, body: Row) -> None:
        cloud = self.cloud
        cloud.require(body.get("previous_response_id") is None, "unknown response")
        calls: set[str] = set()
        for item in body["input"]:
            if "id" in item:
                cloud.require(item["id"] in cloud.ids, f"unknown item {item}")
            if item["type"] == "reasoning":
                cloud.take(item)
            elif item["type"] == "function_call":
                calls.add(item["call_id"])
                cloud.require(CALL_ID.fullmatch(item["call_id"]), "id of a call")
            elif item["type"] == "function_call_output":
                cloud.require(item["call_id"] in calls, "a result without its call")

    def answer(self, turn: Turn) -> None:
        output = self.output(turn)
        self.rows += output
        self.rows += self.asked(output)

    def output(self, turn: Turn) -> list[Row]:
        answer_id, items = uuid.uuid4().hex, []
        for number, item in enumerate(self._items(turn)):
            kind = {"reasoning": "rs", "message": "msg"}.get(item["type"], "fc")
            suffix = f"{answer_id}{number:016}" if turn.in_cloud else f"{answer_id}_{number}"
            items.append({"id": f"{kind}_{suffix}"} | item)
        if turn.in_cloud:
            given = [self.cloud.give(item) for item in items]
            self.opaque += [item for item in given if item["type"] == "reasoning"]
        return items

    def _items(self, turn: Turn) -> list[Row]:
        items: list[Row] = []
        if turn.thinks:
            sealed = _sealed() if turn.in_cloud else SIGNATURE_BEGIN + new_id()
            content = [] if turn.in_cloud else [{"type": "reasoning_text", "text": "hm"}]
            items.append({"type": "reasoning", "summary": [], "content": content})
            items[-1]["encrypted_content"] = sealed
        if turn.says or turn.is_empty:
            part = {"type": "output_text", "text": "said" if turn.says else "", "annotations": []}
            items.append({"type": "message", "role": "assistant", "content": [part]})
        for _ in range(turn.calls):
            call_id = f"call_{new_id()}" if turn.in_cloud else new_id()
            call = {"type": "function_call", "call_id": call_id, "name": "f", "arguments": "{}"}
            items.append(call)
        return items

    def asked(self, output: list[Row]) -> list[Row]:
        """Return what the client sends next."""
        results = [
            {"type": "function_call_output", "call_id": item["call_id"], "output": "x"}
            for item in output
            if item["type"] == "function_call"
        ]
        return results or [{"type": "message", "role": "user", "content": "more"}]


class StoredResponses(Responses):
    """A client of Responses that names the last response and sends what is new."""

    def __init__(self, cloud: Cloud) -> None:
        super().__init__(cloud)
        self.store = ResponseStore()
        self.previous: str | None = None
        self.key = ""

    def body(self) -> Row:
        return {"input": self.rows, "previous_response_id": self.previous}

    def sent(self) -> Row:
        found = self.store.for_cloud(self.key, self.body(), "dep")
        assert found.whole == self.store.expanded(self.key, self.body()) or self.previous is None
        return cloud_body("responses", for_cloud("responses", found.body), "g")

    def read_here(self) -> None:
        assert responses_request.parse(self.store.expanded(self.key, self.body())).prompt.messages

    def answer(self, turn: Turn) -> None:
        output = self.output(turn)
        response_id = "resp_" + (_sealed() if turn.in_cloud else uuid.uuid4().hex)
        response = {"id": response_id, "status": "completed", "output": output}
        whole = self.store.expanded(self.key, self.body())
        self.store.keep(self.key, whole, response, "dep" if turn.in_cloud else "")
        self.previous, self.rows = response_id, self.asked(output)


def play(session: Messages | Chat | Responses, turns: list[Turn]) -> None:
    """Ask for each turn where it is answered; both sides must take the history, the cloud all."""
    for turn in turns:
        before = orjson.dumps(session.body())
        sent = session.sent()
        if turn.in_cloud:
            session.cloud.met.clear()
            session.verify(sent)
            assert list(map(_octets, session.cloud.met)) == list(map(_octets, session.opaque))
        else:
            session.read_here()
        assert orjson.dumps(session.body()) == before
        session.answer(turn)


@given(SESSIONS)
@settings(max_examples=150, deadline=None)
def test_a_session_of_messages_crosses(turns: list[Turn]) -> None:
    play(Messages(Cloud()), turns)


@given(SESSIONS)
@settings(max_examples=150, deadline=None)
def test_a_session_of_chat_crosses(turns: list[Turn]) -> None:
    play(Chat(Cloud()), turns)


@given(SESSIONS)
@settings(max_examples=150, deadline=None)
def test_a_session_of_responses_crosses_with_its_whole_history(turns: list[Turn]) -> None:
    play(Responses(Cloud()), turns)


@given(SESSIONS, st.booleans())
@settings(max_examples=150, deadline=None)
def test_a_session_of_responses_crosses_by_the_last_ones_id(
    turns: list[Turn], has_key: bool
) -> None:
    session = StoredResponses(Cloud())
    session.key = "k" * has_key
    play(session, turns)
