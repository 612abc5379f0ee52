"""Whatever agents were seen to send as chat completions is understood and can be carried."""

from pathlib import Path

import pytest

from hearth.commands.replay.traces import EXCERPTS_DIR, WHOLE_DIR, load_trace
from hearth.proxy.api import chat_completions
from hearth.shared.wire_messages import Constraints, Submit, decode, encode

CLIENTS = ("cline", "openclaw", "opencode", "pi-session-1", "qwen-code")
PATHS = [
    path
    for folder in (EXCERPTS_DIR, WHOLE_DIR)
    for client in CLIENTS
    for path in sorted(folder.glob(f"{client}*.xz"))
]


@pytest.mark.parametrize("path", PATHS, ids=lambda path: f"{path.parent.parent.name}/{path.stem}")
def test_every_chat_request_of_a_captured_session_is_understood(path: Path) -> None:
    rows = load_trace(path)
    assert rows
    for row in rows:
        request = chat_completions.parse(row.body)
        assert request.stream
        assert request.include_usage == bool(row.body["stream_options"]["include_usage"])
        assert len(request.prompt.messages) == len(row.body["messages"])
        assert len(request.prompt.tools) == len(row.body.get("tools") or ())
        assert request.constraints == Constraints()
        submit = Submit("r", request.prompt, request.sampling, request.constraints)
        assert decode(encode(submit)) == submit
