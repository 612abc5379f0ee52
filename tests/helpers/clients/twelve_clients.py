"""Plays twelve programs that ask one server, with as many conversations as a test wants."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import httpx

from tests.helpers.servers.server import WAIT_S_MAX

ANSWER_TOKENS: Final = 24
TURNS: Final = (3, 1, 1, 2, 1, 4)  # of one conversation and the next
# A program's User-Agent, and the header that names its session, "" = it names none.
CLIENTS: Final = {
    "Claude Code 2.1": ("claude-cli/2.1.329 (external, cli)", "x-claude-code-session-id"),
    "Codex 0.169": ("codex_exec/0.169.0 (Debian 12.0.0; x86_64)", "session-id"),
    "opencode 1.18": ("opencode/1.18.33 ai-sdk/provider-utils/4.0.23 runtime/bun/1.3.14", ""),
    "Pi": ("pi (linux 6.18; x64)", "session_id"),
    "Qwen Code 0.24": ("QwenCode/0.24.4 (linux; x64)", ""),
    "js openai 7.15": ("OpenAI/JS 7.15.0", ""),
    "python openai 2.3": ("OpenAI/Python 2.3.0", ""),
    "AI SDK 3.0": ("ai-sdk/openai-compatible/3.0.37 runtime/bun/1.3.13", ""),
    "curl 8.5": ("curl/8.5.0", ""),
    "CherryStudio 1.5": ("Mozilla/5.0 (X11) CherryStudio/1.5.1 Chrome/126 Electron/31", ""),
    "python httpx 0.28": ("python-httpx/0.28.1", ""),
    "Zed 0.201": ("Zed/0.201.4 (macos; aarch64)", ""),
}
_REMINDER: Final = "<system-reminder>\nThe date is 2026-11-26.\n</system-reminder>\n"
_ASKS: Final = (
    *("Fix the failing test in parser.py", "Why is the login page slow?", "Write a changelog"),
    *("Rename User to Account everywhere", "Explain this regular expression", "Add dark mode"),
    *("Review my last commit", "What is the code of the north gate?", "Sum up this meeting"),
    *("Translate the README into German", "Find the memory leak", "Plan a week in Lisbon"),
)
_PLACES: Final = ("api", "web", "billing", "search", "docs", "mobile", "worker", "infra")


@dataclass(frozen=True)
class Conversation:
    """One conversation: who leads it, how it begins, how many turns it has."""

    client: str
    title: str
    turns: int
    number: int


def conversations(count: int) -> Iterator[Conversation]:
    """Yield `count` conversations of all the clients in turn, no two alike."""
    clients, turns = itertools.cycle(CLIENTS), itertools.cycle(TURNS)
    for number in range(count):
        ask = _ASKS[(number + number // len(_ASKS)) % len(_ASKS)]
        place = _PLACES[number // len(_ASKS) % len(_PLACES)]
        again = f", part {number // 96 + 1}" if number >= 96 else ""
        yield Conversation(next(clients), f"{ask} ({place}{again})", next(turns), number)


def lead(url: str, conversation: Conversation, turns: int | None = None) -> int:
    """Lead a conversation to its end; return its requests. Some that have an id edit their past."""
    agent, header = CLIENTS[conversation.client]
    headers = {"user-agent": agent}
    if header:
        headers[header] = f"{header}-{conversation.number:04}-6f0c3a5e"
    reminder = _REMINDER if conversation.client == "Claude Code 2.1" else ""
    system = {"role": "system", "content": f"You help in {conversation.client}. " * 12}
    messages: list[dict[str, Any]] = [
        system,
        {"role": "user", "content": f"{reminder}{conversation.title}"},
    ]
    wanted = conversation.turns if turns is None else turns
    with httpx.Client(base_url=url, headers=headers, timeout=WAIT_S_MAX) as http:
        for turn in range(wanted):
            if header and turn == 2 and conversation.number % 24 == 12:
                system["content"] = f"It is another day. {system['content']}"
            body = {"model": "local", "messages": messages, "max_tokens": ANSWER_TOKENS}
            reply = http.post("/v1/chat/completions", json=body | {"temperature": 0})
            assert reply.status_code == 200, reply.text
            said = reply.json()["choices"][0]["message"]["content"] or ""
            messages = [*messages, {"role": "assistant", "content": said}]
            messages.append({"role": "user", "content": f"And then, after {turn + 1}?"})
    return wanted
