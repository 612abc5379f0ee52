"""The routes of kept responses."""

from pathlib import Path

from hearth.proxy.request.session_id import key_digest
from tests.helpers.proxy.proxy_app import app_of, ask

RESPONSE = {"id": "resp_1", "object": "response", "output": []}


def test_a_kept_response_is_read_listed_and_deleted_by_who_asked_for_it(tmp_path: Path) -> None:
    edge = app_of(tmp_path, PROXY_API_KEYS="mine, other")
    key = key_digest({"x-api-key": "mine"})
    mine, other = ((b"authorization", f"Bearer {name}".encode()) for name in ("mine", "other"))
    for prefix in ("/v1/responses/", "/responses/"):
        path = f"{prefix}resp_1"
        edge.routes.stored.keep(key, {"input": [{"role": "user", "content": "hi"}]}, RESPONSE)
        assert ask(edge, "GET", path, mine).json == RESPONSE
        items = ask(edge, "GET", f"{path}/input_items", mine).json
        assert [row["content"] for row in items["data"]] == ["hi"]
        for method, theirs in (("GET", path), ("GET", f"{path}/input_items"), ("DELETE", path)):
            reply = ask(edge, method, theirs, other)
            assert (reply.status, reply.json["error"]["code"]) == (404, "not_found")
        assert ask(edge, "DELETE", path, mine).json["deleted"] is True
        assert ask(edge, "GET", path, mine).status == 404


def test_what_is_not_served_of_responses_says_so(tmp_path: Path) -> None:
    edge = app_of(tmp_path)
    for method, path, query, status in (
        ("POST", "compact", b"", 404),
        ("POST", "resp_1/cancel", b"", 404),
        ("PUT", "resp_1", b"", 405),
        ("GET", "resp_1", b"stream=true", 400),
    ):
        reply = ask(edge, method, f"/v1/responses/{path}", body=b"{}", query=query)
        assert reply.status == status, path
