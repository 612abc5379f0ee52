"""Checks what the costly events in an agent's session cost: forks, compaction, loaded tools.

The events are those at which captured clients (docs/clients.md) lost most. Real forwards on tiny
models; the model's words are scripted at token level.
"""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from hearth.proxy.request.session_id import session_of
from hearth.worker.stream.answer_parts import AnswerParts, ToolCall
from scripts.harness.agent_worker import Desk, Reply, ideals
from scripts.harness.captured_sessions import PARSE
from scripts.harness.model_families import family
from tests.helpers.by_day import by_day
from tests.helpers.servers.live_sessions import SLACK, TOOLS

Body = dict[str, Any]

KINDS = [("qwen3", "qwen3"), ("qwen3_5", "qwen3_5"), ("harmony", "gpt_oss")]
CALL = AnswerParts("Why not.", "", (ToolCall("Bash", {"command": "ls"}),))
ANSWER = AnswerParts("It works.", "All is well.")
SYSTEM = "You are an agent. " + "Mind the rules. " * 120 + "\nToday's date: Sat Nov 21 2026\n"
CONTEXT = (
    "<<<BEGIN_OPENCLAW_INTERNAL_CONTEXT>>>\nActive exec sessions: none\n"
    "<<<END_OPENCLAW_INTERNAL_CONTEXT>>>"
)
REMINDER = "<system-reminder>\nThe current date is 2026-11-21.\n</system-reminder>\n"


@dataclass
class Agent:
    """One chat client on a desk that others may share."""

    desk: Desk
    session: str
    body: Body = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=dict)
    replies: list[Reply] = field(default_factory=list)

    def __post_init__(self) -> None:
        tools = [{"type": "function", "function": tool} for tool in deepcopy(TOOLS)]
        first = {"role": "system", "content": SYSTEM}
        self.body = {"session_id": self.session, "tools": tools, "messages": [first], **self.body}

    @property
    def messages(self) -> list[Body]:
        found: list[Body] = self.body["messages"]
        return found

    def user(self, text: str) -> None:
        self.messages.append({"role": "user", "content": text})

    def prompt(self) -> Any:
        dialect = "messages" if "max_tokens" in self.body else "chat"
        speaker = session_of(self.headers, self.body, "k")
        return self.desk.named(replace(PARSE[dialect](self.body).prompt, speaker=speaker))

    def ask(self, parts: AnswerParts) -> Reply:
        return self.took(self.desk.ask(self.prompt(), parts))

    def took(self, reply: Reply, text: str = "result word. ") -> Reply:
        """Take an answer up, and the result of its call."""
        self.replies.append(reply)
        turn: Body = {"role": "assistant", "content": reply.given.content}
        self.messages.append(turn)
        for call, call_id in zip(reply.given.calls, reply.call_ids, strict=True):
            function = {"name": call.name, "arguments": call.arguments}
            turn["tool_calls"] = [{"id": call_id, "type": "function", "function": function}]
            result = {"role": "tool", "tool_call_id": call_id, "content": text * 60}
            self.messages.append(result)
        return reply

    def loop(self, turns: int) -> None:
        """Work through a tool loop of so many calls, and answer."""
        for parts in [CALL] * turns + [ANSWER]:
            self.ask(parts)
            self.desk.idle()


def desk_of(kind: tuple[str, str], log_root: Path, **machine: Any) -> Desk:
    return Desk(kind[1], family(kind[0]), log_root, **machine)


def extra(replies: list[Reply]) -> list[int]:
    """Return what each request prefilled beyond what a cache without limits had to."""
    return [r.prefilled - ideal for r, ideal in zip(replies, ideals(replies), strict=True)]


@pytest.mark.parametrize("kind", KINDS)
def test_ten_sub_agents_in_parallel_leave_their_orchestrators_line_intact(
    kind: tuple[str, str], tmp_path: Path
) -> None:
    """They share its system prompt and tools, and run while it waits for them."""
    desk = desk_of(kind, tmp_path)
    main = Agent(desk, "one", headers={"x-session-id": "one"})
    main.user("Have ten things looked up. " * 10)
    main.loop(3)
    main.user("Now all ten.")
    waiting = main.desk.ask(main.prompt(), CALL)  # it called its sub-agents
    agents = []
    for number in range(10):
        headers = {"x-claude-code-session-id": "one", "x-claude-code-agent-id": f"a{number}"}
        agents.append(Agent(desk, "one", headers=headers))
        agents[-1].user(f"Look up thing number {number}. " * 12)
    for parts in (CALL, CALL, ANSWER):
        asked = [desk.submit(agent.prompt(), parts) for agent in agents]
        for agent, reply in zip(agents, desk.finish(asked), strict=True):
            agent.took(reply)
    main.took(waiting)
    after = main.ask(ANSWER)
    kept = len(waiting.ids) + len(waiting.sampled)
    assert after.cached >= kept - 1, "everything that was said before"
    assert after.prefilled <= len(after.ids) - kept + SLACK
    assert after.divergence is None
    told = desk.sessions.lines_report("one")
    assert told is not None and len(told["lines"]) == 11
    assert [line["kind"] for line in told["lines"]].count("main") == 1
    steps = [reply for agent in agents for reply in agent.replies[1:]]
    assert all(set(reply.states.values()) == {"kept"} for reply in steps)
    for agent in agents:
        first, second, third = agent.replies
        for before, reply in ((first, second), (second, third)):
            new = len(reply.ids) - len(before.ids) - len(before.sampled)
            assert reply.prefilled <= new + SLACK


CHUNK = 256  # what a change amid a text costs at most: prefills resume where they are cut


def working(agent: Agent, calls: int = 3, question: str = "") -> None:
    """Have the agent asked something, which takes so many calls."""
    agent.user(question or "Please fix the build. " * 10)
    agent.loop(calls)


def resume(agent: Agent) -> None:
    """--resume: another process, perhaps another session id, the same history."""
    working(agent)
    agent.body["session_id"] = "two"
    agent.user("Go on.")
    assert set(agent.ask(ANSWER).states.values()) == {"kept"}


def compact(agent: Agent) -> None:
    """System and tools stay; nothing of the history is read again."""
    working(agent)
    agent.body["messages"] = agent.messages[:1]
    agent.user("Summary of the work so far: " + "it was fixed. " * 30)
    assert agent.ask(ANSWER).divergence is None
    agent.desk.idle()
    agent.user("Go on.")
    agent.ask(ANSWER)


def vanish_each_time(agent: Agent) -> None:
    agent.user("Please fix the build. " * 10)
    for _ in range(4):
        agent.user(CONTEXT)
        reply = agent.desk.ask(agent.prompt(), CALL)
        agent.messages.pop()
        agent.took(reply)
        agent.desk.idle()


def truncate(agent: Agent) -> None:
    working(agent, 4)
    agent.messages[3]["content"] = agent.messages[3]["content"][:200] + "[... truncated]"
    agent.user("Next.")
    agent.ask(ANSWER)


def flip(agent: Agent) -> None:
    working(agent, 2)
    original = agent.messages[0]["content"]
    for system in ("Internal run. " + original, original, "Internal run. " + original):
        agent.messages[0]["content"] = system
        working(agent, 1, "Next. " * 10)


def remind(agent: Agent) -> None:
    working(agent, 3, REMINDER + "Please fix the build. " * 10)
    agent.messages[1]["content"] = agent.messages[1]["content"].removeprefix(REMINDER)
    working(agent, 1, REMINDER + "Next.")


def change_status(agent: Agent) -> None:
    agent.messages[0]["content"] += "git: (clean)\n"
    working(agent)
    agent.messages[0]["content"] = SYSTEM + "git: M a.py\n"
    working(agent, 1, "Next.")


def load_a_tool(agent: Agent) -> None:
    """ToolSearch: a tool appears amid the list, with defer_loading; its reference in a result."""
    tools = [
        {"name": t["name"], "description": t["description"], "input_schema": t["parameters"]}
        for t in TOOLS
    ]
    agent.body = {
        "max_tokens": 9,
        "metadata": {"user_id": '{"session_id":"one"}'},
        "system": SYSTEM,
        "tools": tools,
        "messages": [{"role": "user", "content": "Search the web. " * 10}],
    }
    reply = agent.desk.ask(agent.prompt(), CALL)
    agent.replies.append(reply)
    use = {"type": "tool_use", "id": reply.call_ids[0], "name": "Bash", "input": {"command": "ls"}}
    loaded = {"type": "tool_reference", "tool_name": "WebFetch"}
    result = {"type": "tool_result", "tool_use_id": reply.call_ids[0], "content": [loaded]}
    agent.messages.append({"role": "assistant", "content": [use]})
    agent.messages.append({"role": "user", "content": [result]})
    late = {"name": "WebFetch", "description": "Fetches. " * 200, "input_schema": {}}
    agent.body["tools"] = [tools[0], late | {"defer_loading": True}, *tools[1:]]
    reply = agent.desk.ask(agent.prompt(), ANSWER)
    assert "WebFetch" in agent.desk.family.tokenizer.decode(reply.ids)
    agent.replies.append(reply)


# What each event costs beyond what a cache without limits must read.
EVENTS: dict[str, tuple[Callable[[Agent], None], int]] = {
    "a restarted client goes on where it was": (resume, SLACK),
    "a compacted conversation shares system and tools": (compact, SLACK),
    "claude code loads a tool": (load_a_tool, SLACK),
    "openclaw's trailing context vanishes": (vanish_each_time, SLACK),
    "openclaw truncates an old result": (truncate, CHUNK),
    "openclaw's system prompt flips and flips back": (flip, CHUNK),
    "qwen's reminder leaves the old message": (remind, SLACK),
    "qwen's git status changes": (change_status, CHUNK),
}


@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize("kind", by_day(KINDS, [("qwen3_5", "qwen3_5")]))
def test_a_dear_event_costs_what_it_must(kind: tuple[str, str], event: str, tmp_path: Path) -> None:
    """Never twice: each event breaks off at one place, and only what is behind it is read again."""
    desk = desk_of(kind, tmp_path)
    agent = Agent(desk, "one")
    play, most = EVENTS[event]
    play(agent)
    more = extra(agent.replies)
    assert max(more) <= most, more
    assert sum(each > SLACK for each in more) <= 1, "what follows the event is a step as any"
    assert desk.sessions.counts["exact_key_rejected_by_model_lcp"] == 0
    if play is load_a_tool:
        assert all(reply.divergence is None for reply in agent.replies)


@pytest.mark.parametrize("kind", by_day(KINDS, [("harmony", "gpt_oss")]))
def test_thinking_that_has_to_go_goes_while_the_client_is_busy(
    kind: tuple[str, str], tmp_path: Path
) -> None:
    """PRESERVE_THINKING=false: a new question drops the thinking before it, from far back on."""
    prefilled = {}
    for idles in (False, True):
        settings = {"PRESERVE_THINKING": "false"}
        desk = desk_of(kind, tmp_path / str(idles), settings=settings)
        agent = Agent(desk, "one")
        agent.user("Please fix the build. " * 10)
        for parts in (CALL, CALL, CALL, ANSWER):
            agent.ask(parts)
        if idles:
            desk.idle()
        agent.user("Next.")
        reply = agent.ask(ANSWER)
        assert "Why not." not in desk.family.tokenizer.decode(reply.ids)
        prefilled[idles] = reply.prefilled
    assert prefilled[False] > 500, "the whole loop is rendered anew"
    assert prefilled[True] <= 64 + SLACK, "the last header may be less than a cut away"
