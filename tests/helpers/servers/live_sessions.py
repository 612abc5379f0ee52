"""Plays an agent's session on a server and compares its token counts with the ideal cache's."""

from collections.abc import Sequence
from dataclasses import replace

from hearth.commands.replay.traces import Captured
from hearth.proxy.request.session_id import session_of
from hearth.shared.wire_messages import Prompt
from hearth.worker.schedule.request_state import Request
from hearth.worker.stream.answer_parts import AnswerParts, ToolCall
from scripts.harness.agent_worker import Desk, Reply, ideals
from scripts.harness.captured_sessions import PARSE, Exchange
from tests.helpers.clients.client_echoes import CWD, Client

SLACK = 16  # tokens that a step may prefill beyond what is new

TYPES = {
    "Bash": {"command": "string", "timeout": "number"},
    "Edit": {"file_path": "string", "old": "string", "new": "string", "replace_all": "boolean"},
    "Write": {"content": "string", "file_path": "string"},
    "Read": {"file_path": "string", "offset": "number"},
}
TOOLS = [
    {
        "name": name,
        "description": f"{name} does what its name says. " * 3,
        "parameters": {
            "type": "object",
            "properties": {
                field: {"type": kind} | ({"default": False} if kind == "boolean" else {})
                for field, kind in types.items()
            },
        },
    }
    for name, types in TYPES.items()
]
SCRIPT = (
    AnswerParts(
        "Look first.", "Let me check.", (ToolCall("Bash", {"command": f"cd {CWD} && ls -la"}),)
    ),
    AnswerParts("", "", (ToolCall("Read", {"file_path": "src/ä.py", "offset": "3"}),)),
    AnswerParts(
        "Now change it.", "", (ToolCall("Edit", {"file_path": "a", "old": "x", "new": "y"}),)
    ),
    AnswerParts("", "Waiting.", (ToolCall("Bash", {"command": "make", "timeout": 5000.0}),)),
    AnswerParts("", "", (ToolCall("Write", {"content": 'say "hi"\n\ttab', "file_path": "b"}),)),
    AnswerParts("All is done.", "Done: two files changed."),
)


def prompt_of(desk: Desk, client: Client) -> Prompt:
    """Return what the proxy makes of the client's next request."""
    body = client.body()
    speaker = session_of(client.headers, body, "k")
    return desk.named(replace(PARSE[client.dialect](body).prompt, speaker=speaker))


def step(desk: Desk, client: Client, parts: AnswerParts) -> Reply:
    """Have the client ask, the model answer, the client take the answer up and run its tools."""
    reply = desk.ask(prompt_of(desk, client), parts)
    client.answered(reply.given, reply.call_ids, reply.signature)
    if parts.calls:
        text = f"result of {parts.calls[0].name}: <|im_end|> " + "word " * (20 + len(client.turns))
        client.results(reply.call_ids, [text] * len(parts.calls))
    return reply


def held_to_the_ideal(replies: list[Reply]) -> None:
    needed = ideals(replies)
    for reply, ideal in zip(replies, needed, strict=True):
        if reply.states:  # a step; what opens a line shares no more than whole chunks of a trunk
            assert reply.prefilled <= ideal + SLACK, (reply.prefilled, ideal, reply.divergence)
        assert set(reply.states.values()) <= {"kept"}, reply.states
    total = sum(reply.prefilled for reply in replies)
    assert total <= 1.03 * sum(needed), (total, sum(needed))


def answer(desk: Desk, client: Client, parts: AnswerParts) -> Request:
    """Do as `step`, but for the forwards: only what was said is known of the answer."""
    prompt = prompt_of(desk, client)
    request = desk.request(prompt)
    desk.pretend(request, parts)
    assert request.session_context is not None and request.session_context.turn is not None
    turn = request.session_context.turn
    client.answered(parts, turn.call_ids, turn.signature)
    if parts.calls:
        client.results(turn.call_ids, ["done"] * len(parts.calls))
    return request


def exchanges_of(desk: Desk, client: Client, script: Sequence[AnswerParts]) -> list[Exchange]:
    """Return a session of two questions, as `answer` plays it, in the form of captured ones."""
    client.user("Please fix the build.")
    found = []
    for number, parts in enumerate([*script] * 2):
        prompt, body = prompt_of(desk, client), client.body()
        row = Captured("live", client.dialect, "", client.headers, body, "", number, number + 0.5)
        request = answer(desk, client, parts)
        assert request.session_context is not None and request.session_context.turn is not None
        turn = request.session_context.turn
        found.append(Exchange(row, prompt, parts, turn.call_ids, turn.signature))
        if not parts.calls:
            client.user(f"And now the tests, number {number}.")
    return found
