"""Checks that a loss of cached tokens is reported with the right message and the right cause."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from hearth.proxy.request.session_id import session_of
from hearth.worker.sessions.session_context import REMEDIES
from hearth.worker.stream.answer_parts import AnswerParts, ToolCall
from scripts.harness.agent_worker import Desk, Reply
from scripts.harness.captured_sessions import PARSE
from scripts.harness.model_families import family
from tests.helpers.servers.live_sessions import TOOLS

Body = dict[str, Any]

SYSTEM = (
    "You are an agent.\nWorking directory: /home/dev/project\n"
    "Today's date: Sat Nov 21 2026\ngit: (clean)\n" + "Mind the rules. " * 60
)
REMINDER = "<system-reminder>\nThe current date is 2026-11-21.\n</system-reminder>\n"
CALL = AnswerParts("Why not.", "I look.", (ToolCall("Bash", {"command": "ls"}),))
ANSWER = AnswerParts("It works.", "All is well.")
LONG_ANSWER = AnswerParts("It works.", "All is well. " * 20 + "The build is as it was before. " * 4)


class Conversation:
    """One chat session: a question with a tool call, an answer, and the next question."""

    def __init__(self, log_root: Path, family_name: str = "qwen3", **settings: str) -> None:
        self.desk = Desk("qwen3", family(family_name), log_root, settings=settings)
        self.body: Body = {
            "session_id": "one",
            "tools": [{"type": "function", "function": tool} for tool in deepcopy(TOOLS)],
            "messages": [
                {"role": "system", "content": SYSTEM},
                {"role": "user", "content": REMINDER + "Please fix the build. " * 8},
            ],
        }
        self.last: Reply | None = None

    def ask(self, parts: AnswerParts) -> Reply:
        prompt = PARSE["chat"](self.body).prompt
        speaker = session_of({}, self.body, "k")
        self.last = self.desk.ask(self.desk.named(prompt, speaker), parts)
        return self.last

    def take(self, parts: AnswerParts, text: str = "made. ") -> None:
        """Take an answer up, and what follows it: a tool's result, or the next question."""
        assert self.last is not None
        turn: Body = {"role": "assistant", "content": parts.content}
        turn["reasoning_content"] = parts.reasoning
        for call, call_id in zip(parts.calls, self.last.call_ids, strict=True):
            function = {"name": call.name, "arguments": call.arguments}
            turn["tool_calls"] = [{"id": call_id, "type": "function", "function": function}]
        self.body["messages"].append(turn)
        following: Body = {"role": "user", "content": text * 30}
        if parts.calls:
            following = {"role": "tool", "tool_call_id": self.last.call_ids[0]}
            following["content"] = text * 30
        self.body["messages"].append(following)


def message(at: int) -> Callable[[Body], Body]:
    def found(body: Body) -> Body:
        chosen: Body = body["messages"][at]
        return chosen

    return found


@dataclass(frozen=True)
class Planted:
    """Something that is done to a conversation of six messages before its next request."""

    does: Callable[[Body], Any]
    cause: str
    message: int
    rule: str | None = None
    answer: AnswerParts = ANSWER


def replaced(at: int, old: str, new: str) -> Callable[[Body], Any]:
    def change(body: Body) -> None:
        chosen = body["messages"][at]
        assert old in chosen["content"]
        chosen["content"] = chosen["content"].replace(old, new, 1)

    return change


def tool_edited(body: Body) -> None:
    body["tools"][1]["function"]["description"] += " Also more."


def arguments_changed(body: Body) -> None:
    body["messages"][2]["tool_calls"][0]["function"]["arguments"] = {"command": "ls -l"}


def new_tool() -> Body:
    return {"type": "function", "function": TOOLS[0] | {"name": "Another"}}


PLANTED = {
    "a date in the system prompt": Planted(
        replaced(0, "Nov 21 2026", "Nov 22 2026"), "volatile field", 0, "current_time"
    ),
    "git status in the system prompt": Planted(
        replaced(0, "(clean)", "M a.py"), "system prompt", 0
    ),
    "a reminder that vanishes": Planted(
        replaced(1, REMINDER, ""), "volatile field", 1, "system_reminder"
    ),
    "an edited question": Planted(replaced(1, "build", "tests"), "message edited", 1),
    "an edited tool result": Planted(replaced(3, "made. made", "MADE. made"), "tool result", 3),
    "a truncated tool result": Planted(
        replaced(3, "made. " * 20, "[... 120 more characters truncated"), "tool result", 3
    ),
    "a changed answer": Planted(
        replaced(4, "All is well.", "All is bad."), "assistant turn", 4, answer=LONG_ANSWER
    ),
    "changed arguments": Planted(arguments_changed, "assistant turn", 2),
    "an inserted message": Planted(
        lambda body: body["messages"].insert(2, {"role": "user", "content": "By the way. " * 9}),
        "message inserted",
        2,
    ),
    "a removed message": Planted(lambda body: body["messages"].pop(1), "message removed", 1),
    "a tool that comes": Planted(
        lambda body: body["tools"].insert(1, new_tool()), "tool added", -1, "Another"
    ),
    "a tool that goes": Planted(lambda body: body["tools"].pop(), "tool removed", -1, "Read"),
    "an edited tool": Planted(tool_edited, "tool schema", -1, "Edit"),
    "tools in another order": Planted(lambda body: body["tools"].reverse(), "tool order", -1),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_cause_is_named_with_its_message(name: str, tmp_path: Path) -> None:
    planted = PLANTED[name]
    talk = Conversation(tmp_path)
    first = talk.ask(CALL)
    talk.take(CALL)
    second = talk.ask(planted.answer)
    assert first.divergence is second.divergence is None
    talk.take(planted.answer, "And now? ")
    planted.does(talk.body)
    reply = talk.ask(ANSWER)
    lost = reply.divergence
    assert lost is not None
    assert (lost["cause"], lost["message"]) == (planted.cause, planted.message), lost
    assert lost["rule"] == planted.rule, lost
    assert lost["remedy"] == REMEDIES[planted.cause]
    assert 16 < lost["lost"] <= reply.prefilled
    assert lost["was"] != lost["now"] or lost["cause"] == "history rewritten"
    counts = talk.desk.sessions.counts
    assert counts["canonical_drift"] == (planted.cause == "volatile field")
    assert counts["exact_key_rejected_by_model_lcp"] == 0


def test_another_template_option_is_told(tmp_path: Path) -> None:
    """GLM's template writes /nothink behind each user message where thinking is off."""
    talk = Conversation(tmp_path, "glm4")
    for parts in (CALL, ANSWER):
        talk.ask(parts)
        talk.take(parts)
    talk.body["chat_template_kwargs"] = {"enable_thinking": False}
    lost = talk.ask(replace(ANSWER, reasoning="")).divergence
    assert lost is not None
    assert (lost["cause"], lost["rule"]) == ("template option", "enable_thinking"), lost


def test_thinking_that_the_template_drops_is_told(tmp_path: Path) -> None:
    talk = Conversation(tmp_path, PRESERVE_THINKING="false")
    for parts in (CALL, ANSWER):
        talk.ask(parts)
        talk.take(parts)
    lost = talk.ask(ANSWER).divergence
    assert lost is not None
    found = (lost["cause"], lost["message"], lost["role"])
    assert found == ("thinking dropped", 2, "assistant"), lost
    assert "PRESERVE_THINKING" in lost["remedy"]


def test_an_answer_cut_by_a_stop_string_is_told(tmp_path: Path) -> None:
    talk = Conversation(tmp_path)
    long = replace(ANSWER, content="All is well. " * 10 + "STOP and more of it. " * 4)
    prompt = talk.desk.named(PARSE["chat"](talk.body).prompt, session_of({}, talk.body, "k"))
    answer = talk.desk.submit(prompt, long, ["STOP"])
    talk.desk.machine.run()
    shown = answer.request.output.text
    assert shown.endswith("well. ") and answer.request.session_context is not None
    assert answer.request.session_context.turn is None
    talk.body["messages"] += [
        {"role": "assistant", "content": "All is well. " * 10, "reasoning_content": "It works."},
        {"role": "user", "content": "And?"},
    ]
    lost = talk.ask(ANSWER).divergence
    assert lost is not None and (lost["cause"], lost["message"]) == ("turn not recorded", 2), lost


def test_exact_mode_says_that_it_reads_answers_again(tmp_path: Path) -> None:
    talk = Conversation(tmp_path, CACHE_EXACT="true")
    talk.desk = Desk(
        "qwen3", family("qwen3"), tmp_path, settings={"CACHE_EXACT": "true"}, is_exact=True
    )
    long = replace(ANSWER, content="All is well. " * 100)
    talk.ask(long)
    talk.take(long)
    lost = talk.ask(ANSWER).divergence
    assert lost is not None and lost["cause"] == "exact mode", lost


def test_another_conversations_words_are_not_told(tmp_path: Path) -> None:
    """One session id for all that a client does: what is held against may be another's."""
    talk = Conversation(tmp_path)
    system, shared = talk.body["messages"]
    for words in ("My secret is 4711. ", "Something else entirely. "):
        own = [{"role": "user", "content": f"{words} {number} " * 20} for number in range(4)]
        talk.body["messages"] = [system, *own, shared]
        lost = talk.ask(ANSWER).divergence
    assert lost is not None and lost["was"] == lost["now"] == ""


def test_a_compacted_history_that_keeps_its_last_messages_is_told(tmp_path: Path) -> None:
    talk = Conversation(tmp_path)
    for parts in (CALL, LONG_ANSWER, CALL, LONG_ANSWER):
        talk.ask(parts)
        talk.take(parts)
    talk.body["messages"][1:6] = [{"role": "user", "content": "Summary: all was fixed. " * 9}]
    reply = talk.ask(ANSWER)
    assert reply.divergence is not None
    found = (reply.divergence["cause"], reply.divergence["message"])
    assert found == ("history rewritten", 1), reply.divergence
    assert 16 < reply.divergence["lost"] <= reply.prefilled
