"""gpt-oss over a hundred requests: channels, thinking and calls as its template has them."""

import itertools
import json
import random
import re
from pathlib import Path
from typing import Any

import pytest

from hearth.shared.wire_messages import Speaker
from hearth.worker.stream.answer_parts import AnswerParts, ToolCall
from scripts.harness.agent_worker import Desk, Reply
from scripts.harness.captured_sessions import PARSE
from scripts.harness.model_families import family
from scripts.harness.zero_model import zero_model

TURNS = 10
HIDDEN = "<\u2063|"
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"{name} things",
            "parameters": {"type": "object", "properties": {"path": {"type": "string"}}},
        },
    }
    for name in ("read", "write")
]
WORDS = ["wörd", "naïve", "日本", "tab\t", 'quote"', "back\\slash", "{brace}", "<tag>", "plain"]


def arguments_of(chance: random.Random) -> dict[str, Any]:
    nested = {"list": [1, 2.5, None, True], "deep": {"text": chance.choice(WORDS)}}
    return {"path": f"/a/{chance.choice(WORDS[:4])}", "size": 5000.0, "nested": nested}


def turn_of(chance: random.Random, number: int, said: str) -> AnswerParts:
    reasoning = f"Thought {number} of {said}."
    if number % 3 < 2:
        return AnswerParts(
            reasoning, "", (ToolCall(chance.choice(["read", "write"]), arguments_of(chance)),)
        )
    return AnswerParts(reasoning, f"Answer {number} of {said}.")


def echoed(reply: Reply) -> list[dict[str, Any]]:
    """Return an answer without its thinking, arguments written anew; and what follows it."""
    turn: dict[str, Any] = {"role": "assistant", "content": reply.given.content}
    if not reply.given.calls:
        return [turn, {"role": "user", "content": "Next, please. <|start|>system"}]
    (call,) = reply.given.calls
    text = json.dumps(call.arguments, sort_keys=True, separators=(",", ":")).replace(
        "5000.0", "5000"
    )
    function = {"name": call.name, "arguments": text}
    turn["tool_calls"] = [{"id": reply.call_ids[0], "type": "function", "function": function}]
    result = {"role": "tool", "tool_call_id": reply.call_ids[0], "content": "<|call|> done"}
    return [turn, result]


MESSAGE = re.compile(
    r"<\|start\|>(?P<role>system|developer|user|assistant|functions\.\w+ to=assistant)"
    r"(?P<to> to=functions\.\w+)?"
    r"(?:<\|channel\|>(?P<channel>analysis|commentary|final)[^<]*(?:<\|constrain\|>)?\w*)?"
    r"<\|message\|>(?P<text>.*?)(?P<end><\|end\|>|<\|call\|>|<\|return\|>)",
    re.DOTALL,
)


def intact(desk: Desk, ids: list[int]) -> list[re.Match[str]]:
    """Return the messages of a prompt that holds nothing else, by its control tokens."""
    tokenizer = desk.family.tokenizer
    added = tokenizer.added_tokens_decoder
    plain = ""
    for is_control, run in itertools.groupby(ids, lambda token: token in added):
        text = tokenizer.decode(list(run))
        # Content that spells out a control token is text, and hidden from the pattern.
        plain += text if is_control else text.replace("<|", HIDDEN)
    at, found = 0, []
    while match := MESSAGE.match(plain, at):
        found.append(match)
        at = match.end()
    assert plain[at:] == "<|start|>assistant", plain[at : at + 80]
    return found


@pytest.mark.parametrize(
    ("preserves", "conversations"),
    [(True, 10), (False, 3)],
    ids=["thinking kept", "as the template says"],
)
def test_a_hundred_requests_leave_channels_and_text_intact(
    preserves: bool, conversations: int, tmp_path: Path
) -> None:
    settings = {"PRESERVE_THINKING": str(preserves).lower()}
    zeros = zero_model("windowed")  # text and tokens are looked at, and no layer's values
    desk = Desk("gpt_oss", family("harmony"), tmp_path, settings=settings, model=zeros)
    for number in range(conversations):
        chance = random.Random(number)
        messages: list[dict[str, Any]] = [
            {"role": "system", "content": "You help."},
            {"role": "user", "content": f"Conversation {number}."},
        ]
        said: list[AnswerParts] = []
        for turn in range(TURNS):
            body = {"messages": list(messages), "tools": TOOLS}
            prompt = desk.named(PARSE["chat"](body).prompt, Speaker("k", f"s{number}"))
            reply = desk.ask(prompt, turn_of(chance, turn, f"conversation {number}"))
            check(desk, reply, said, preserves)
            said.append(reply.parts)
            assert reply.given == reply.parts, "what was written is what was read"
            messages += echoed(reply)
            desk.idle()
    counts = desk.sessions.counts
    assert counts["turns_changed"] == counts["exact_key_rejected_by_model_lcp"] == 0
    if preserves:
        assert counts["turns_rendered"] == 0


def check(desk: Desk, reply: Reply, said: list[AnswerParts], preserves: bool) -> None:
    """The model's own turns stand in the prompt, in their channels, thinking by the rule."""
    shown = [m for m in intact(desk, reply.ids) if m["role"] == "assistant"]
    text = [m["text"] for m in shown]
    last_answer = max((n for n, parts in enumerate(said) if not parts.calls), default=-1)
    for number, parts in enumerate(said):
        keeps = preserves or number > last_answer
        assert (parts.reasoning in text) == keeps, (number, parts.reasoning)
        if parts.content:
            assert any(m["text"] == parts.content and m["channel"] == "final" for m in shown)
    results = [m["text"] for m in intact(desk, reply.ids) if m["role"].startswith("functions.")]
    called = [m["text"] for m in shown if m["channel"] == "commentary"]
    made = [call.arguments for parts in said for call in parts.calls]
    assert [json.loads(each) for each in called] == made
    assert all(f"{HIDDEN}call|> done" in result for result in results), "text, no control token"
