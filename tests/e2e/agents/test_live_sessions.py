"""Live agent sessions on real forwards: every token that was sampled is read once.

The model's own answers come back the way each client sends them; its words are scripted at token
level (scripts/harness/agent_worker.py), everything else is real.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hearth.proxy.request.session_id import session_of
from hearth.shared.wire_messages import Prompt
from hearth.worker.stream.model_output_format import AnswerParts, ToolCall
from scripts.harness.agent_worker import Desk, Reply, ideals
from scripts.harness.captured_sessions import PARSE
from scripts.harness.model_families import family
from tests.helpers.client_echoes import CLIENTS, CWD, Client

KINDS = [("qwen3", "qwen3"), ("qwen3_5", "qwen3_5"), ("harmony", "gpt_oss")]
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
            "properties": {field: {"type": kind} for field, kind in types.items()},
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


def scripted(family_name: str) -> list[AnswerParts]:
    """Return the script as that family can say it: harmony has either words or thinking."""
    return [
        replace(parts, content="") if family_name == "harmony" and parts.calls else parts
        for parts in SCRIPT
    ]


def held_to_the_ideal(replies: list[Reply]) -> None:
    needed = ideals(replies)
    for reply, ideal in zip(replies, needed, strict=True):
        if reply.states:  # a step; what opens a line shares no more than whole chunks of a trunk
            assert reply.prefilled <= ideal + SLACK, (reply.prefilled, ideal, reply.divergence)
        assert set(reply.states.values()) <= {"kept"}, reply.states
    total = sum(reply.prefilled for reply in replies)
    assert total <= 1.03 * sum(needed), (total, sum(needed))


@pytest.mark.parametrize(
    ("family_name", "fixture", "strips_thinking"),
    [(*kind, True) for kind in KINDS] + [("qwen3_5", "qwen3_5", False)],
    ids=["dense, stripped", "hybrid, stripped", "window, stripped", "hybrid, thinking kept"],
)
@pytest.mark.parametrize("client_name", CLIENTS)
def test_generated_tokens_are_never_read_again(
    family_name: str, fixture: str, client_name: str, strips_thinking: bool, tmp_path: Path
) -> None:
    """Two questions with a tool loop each, a sub-agent of another prompt in between."""
    desk = Desk(fixture, family(family_name), tmp_path)
    client = CLIENTS[client_name](strips_thinking=strips_thinking, tools=TOOLS)
    helper = CLIENTS[client_name](system=f"Working directory: {CWD}\n" * 60, tools=TOOLS)
    client.user("Please fix the build. " * 5)
    helper.user("Where is it?")
    replies = []
    for number, parts in enumerate([*scripted(family_name)] * 2):
        replies.append(step(desk, client, parts))
        desk.idle()
        if number in (1, 2):
            replies.append(step(desk, helper, scripted(family_name)[number]))
            desk.idle()
        if not parts.calls:
            client.user(f"And now the tests, number {number}.")
    held_to_the_ideal(replies)
    counts = desk.sessions.counts
    assert counts["turns_changed"] == counts["exact_key_rejected_by_model_lcp"] == 0
    assert counts["turns_rendered"] == 0


def test_a_turn_that_the_user_changed_is_shown_as_changed(tmp_path: Path) -> None:
    desk = Desk("qwen3", family("qwen3"), tmp_path)
    client = CLIENTS["pi"](tools=TOOLS)
    client.user("Please fix the build.")
    step(desk, client, SCRIPT[0])
    step(desk, client, SCRIPT[5])
    client.turns[-1]["content"] = "Done: nothing changed."
    client.user("Go on.")
    reply = desk.ask(prompt_of(desk, client), SCRIPT[5])
    shown = desk.family.tokenizer.decode(reply.ids)
    assert "Done: nothing changed." in shown
    assert "Done: two files changed." not in shown
    assert list(reply.states.values()) == ["kept", "changed"]
    assert reply.divergence is not None
    assert (reply.divergence["cause"], reply.divergence["message"]) == ("assistant turn", 4)


def test_another_key_or_line_never_gets_a_turn_by_its_words(tmp_path: Path) -> None:
    desk = Desk("qwen3", family("qwen3"), tmp_path)
    said = AnswerParts("A secret plan.", "Let me check.")
    for key, question in (("k", "one"), ("k", "two"), ("other", "one")):
        messages: list[dict[str, Any]] = [{"role": "user", "content": question}]
        prompt = Prompt(messages)
        if (key, question) == ("k", "one"):
            desk.ask(desk.named(prompt, session_of({}, {}, key)), said)
        echo = {"role": "assistant", "content": "Let me check."}
        more = Prompt([*messages, echo, {"role": "user", "content": "so?"}])
        request = desk.request(desk.named(more, session_of({}, {}, key)))
        shown = "A secret plan." in desk.family.tokenizer.decode(request.ids)
        assert shown == ((key, question) == ("k", "one"))
