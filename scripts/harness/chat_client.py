"""Leads conversations with a worker without sockets, as a client of the chat API keeps them.

The model's answers are scripted and have words of their own, and so has every message: a word that
stands in two prompts was sent again.
"""

import copy
import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from hearth.proxy.request.session_id import session_of
from hearth.shared.errors import RequestError
from hearth.worker.stream.answer_parts import AnswerParts, ToolCall
from scripts.harness.agent_worker import Desk, given
from scripts.harness.captured_sessions import PARSE
from scripts.harness.model_families import family
from scripts.harness.socketless_worker import Answer
from scripts.harness.zero_model import Layers, zero_model

Body = dict[str, Any]

ROOM_MB: Final = 1  # more than one plan's conversations take
STOP: Final = "STOP"
REMINDER: Final = "<system-reminder>\nThe current date is 2026-11-{}.\n</system-reminder>\n"


@dataclass(frozen=True)
class Variant:
    """A kind of worker that conversations are played against."""

    family: str
    layers: Layers = "dense"
    chunk: int = 256
    is_exact: bool = False
    preserves_thinking: bool = True
    calls: bool = True  # whether its models call tools here
    budget_mb: float = 512
    slots: int = 4


@dataclass(eq=False)
class Asked:
    """One request, what came of it, and what was sent before it in the same conversation."""

    kind: str
    body: Body
    session: tuple[str, str]
    before: "Asked | None"
    answer: Answer
    happened: frozenset[str]  # until now: "evicted", "restarted", "stopped" by a stop string
    is_forgotten: bool = False  # the sessions were told to forget it

    @property
    def ids(self) -> list[int]:
        return self.answer.request.ids

    @property
    def fed(self) -> list[int]:
        """The prompt and what was sampled."""
        return [*self.ids, *self.answer.request.sampled]

    @property
    def messages(self) -> list[Body]:
        return list(self.body["messages"])

    @property
    def is_left(self) -> bool:
        """Whether its client left before it was answered."""
        return self.answer.request.lease.is_cancelled

    @property
    def said(self) -> str:
        """What was answered, without thinking and calls."""
        visit = self.answer.request.session_context
        return visit.answer.content if visit is not None and visit.answer is not None else ""

    @property
    def told(self) -> dict[str, Any] | None:
        assert self.answer.usage is not None
        return self.answer.usage.divergence


@dataclass(eq=False)
class Chat:
    """A conversation as its client keeps it."""

    session: str
    messages: list[Body]
    tools: list[Body]
    agent: str = ""
    options: Body = field(default_factory=dict)
    last: Asked | None = None
    echoes_thinking: bool = True
    stops: bool = False  # the next answer is cut by a stop string

    def fork(self) -> "Chat":
        messages, tools, options = copy.deepcopy((self.messages, self.tools, self.options))
        return replace(
            self, messages=messages, tools=tools, options=options, last=None, stops=False
        )

    @property
    def head(self) -> list[Body]:
        """The system message, where there is one."""
        return [message for message in self.messages[:1] if message["role"] == "system"]

    def at(self, role: str) -> list[int]:
        return [n for n, message in enumerate(self.messages) if message["role"] == role]

    def body(self) -> Body:
        may_be = {
            "model": "m",
            "messages": self.messages,
            "tools": self.tools,
            "chat_template_kwargs": self.options,
            "session_id": self.session if not self.agent else "",
        }
        return copy.deepcopy({name: value for name, value in may_be.items() if value})


@functools.cache
def _desk(variant: Variant, logs: Path) -> Desk:
    return Desk(
        "qwen3",
        family(variant.family),
        logs,
        chunk=variant.chunk,
        settings={
            "CACHE_EXACT": str(variant.is_exact).lower(),
            "PRESERVE_THINKING": str(variant.preserves_thinking).lower(),
        },
        model=zero_model(variant.layers),
        is_exact=variant.is_exact,
        budget_mb=variant.budget_mb,
        slots_max=variant.slots,
    )


class ChatClient:
    """Leads conversations with a worker that all clients of its variant share, one at a time.

    What a client says has an API key and words of its own, and the cache is emptied before it.
    """

    _keys = itertools.count()

    def __init__(self, variant: Variant, tools: int, logs: Path) -> None:
        """A new conversation has so many `tools`."""
        self.variant = variant
        self._tool_count = tools
        self.desk = _desk(variant, logs)
        self.desk.forget()
        self.desk.foreseen.clear()
        self.family = self.desk.family
        self.key = f"key{next(self._keys)}"
        self._words = itertools.count()
        self.chats: list[Chat] = []
        self.asked: list[Asked] = []
        self.refused = 0
        self._turn = 0
        self.day = 10
        self._happened: set[str] = set()
        self._evictions = self.desk.machine.keeper.evictions

    # ------------------------------------------------------------ requests

    def ask(self, kind: str, chats: list[Chat]) -> bool:
        """Send them at once; say whether the template takes them."""
        try:
            pairs = [self._submit(chat) for chat in chats]
        except RequestError:
            self.refused += 1
            return False
        finally:
            self.desk.machine.run()
        for chat, (body, answer) in zip(chats, pairs, strict=True):
            chat.last = self._note(kind, chat, chat.last, body, answer)
        return True

    def leave(self, chat: Chat, last: Asked | None) -> None:
        """Send it, and leave when the answer begins."""
        body, answer = self._submit(chat)
        self.desk.machine.run(until=lambda: bool(answer.request.sampled))
        answer.request.lease.is_cancelled = True
        self.desk.machine.run()
        self._note("left", chat, last, body, answer)

    def _note(self, kind: str, chat: Chat, last: Asked | None, body: Body, answer: Answer) -> Asked:
        is_full = self.variant.budget_mb < ROOM_MB  # not even kept, so not evicted either
        befell = {
            "evicted": is_full or self.desk.machine.keeper.evictions > self._evictions,
            "stopped": chat.stops,
        }
        self._happened |= {what for what, is_so in befell.items() if is_so}
        chat.stops = False
        session = (chat.session, chat.agent)
        self.asked.append(Asked(kind, body, session, last, answer, frozenset(self._happened)))
        return self.asked[-1]

    def _submit(self, chat: Chat) -> tuple[Body, Answer]:
        body = chat.body()
        ids = {"x-claude-code-session-id": chat.session, "x-claude-code-agent-id": chat.agent}
        prompt = PARSE["chat"](copy.deepcopy(body)).prompt
        named = self.desk.named(prompt, session_of(ids if chat.agent else {}, body, self.key))
        self._turn += 1
        return body, self.desk.submit(named, self._parts(chat), [STOP] if chat.stops else [])

    def _parts(self, chat: Chat) -> AnswerParts:
        """Return what the model says next: now and then it thinks, and calls a tool."""
        turn = self._turn
        if chat.stops:
            return AnswerParts("", f"{self.text(22)} {STOP} {self.text(2)}")
        thinks = self.family.thinks and turn % 3 != 0 and chat.options.get("enable_thinking", True)
        reasoning = self.text(2 + turn % 4) if thinks else ""
        calls: tuple[ToolCall, ...] = ()
        if chat.tools and self.variant.calls and turn % 2:
            name = chat.tools[turn % len(chat.tools)]["function"]["name"]
            calls = (ToolCall(name, {"path": self.text(2)}),)
        return AnswerParts(reasoning, self.text(2 + 3 * (turn % 3)), calls)

    def _turn_of(self, parts: AnswerParts, call_ids: Sequence[str]) -> Body:
        """Return an answer as clients send it back, whatever the family's template reads."""
        return replace(self.family, reasoning_field="reasoning_content").message(parts, call_ids)

    # ------------------------------------------------------------ messages

    def text(self, count: int) -> str:
        """Return so many words that no text had before."""
        return " ".join(f"z{next(self._words):04x}" for _ in range(count))

    def user(self, count: int, has_date: bool = False) -> Body:
        reminder = REMINDER.format(f"{self.day:02}") if has_date else ""
        return {"role": "user", "content": reminder + self.text(count)}

    def system(self, count: int) -> Body:
        date = f"Today's date: Sat Nov {self.day:02} 2026"
        return {"role": "system", "content": f"{self.text(count)}\n{date}\n{self.text(count)}"}

    def tool(self) -> Body:
        return {
            "type": "function",
            "function": {
                "name": f"do_{self.text(1)}",
                "description": self.text(6),
                "parameters": {"type": "object", "properties": {"path": {"type": "string"}}},
            },
        }

    def import_history(self, is_named: bool, rounds: int) -> Chat:
        """Return a conversation whose turns this server has not written."""
        session = f"s{len(self.asked)}" if is_named else ""
        tools = [self.tool() for _ in range(self._tool_count)]
        chat = Chat(session, [self.system(6 + rounds % 12)], tools)
        for n in range(rounds):
            chat.messages.append(self.user(4 + (7 * n + rounds) % 20, has_date=n == 0))
            if n + 1 < rounds:
                chat.messages += self._made_up_turn(chat, n)
        return chat

    def _made_up_turn(self, chat: Chat, number: int) -> list[Body]:
        thinks = self.family.thinks and number % 3 == 1
        said = AnswerParts(
            content=self.text(3 + 3 * number % 17), reasoning=self.text(6) if thinks else ""
        )
        if not (chat.tools and self.variant.calls and number % 2):
            return [self._turn_of(said, ())]
        call = ToolCall(chat.tools[0]["function"]["name"], '{"path": "/tmp"}')
        call_id = f"made{number:05d}"
        return [
            self._turn_of(replace(said, calls=(call,)), [call_id]),
            {"role": "tool", "tool_call_id": call_id, "content": self.text(12)},
            {"role": "assistant", "content": self.text(5)},
        ]

    # ------------------------------------------------------------ what a client does

    def take(self, chat: Chat, last: Asked | None, count: int) -> None:
        """Take the last answer up, and what follows it: a tool's result, or the next question."""
        assert last is not None
        said, call_ids = given(last.answer.request), last.answer.request.deltas.call_ids
        said = said if chat.echoes_thinking else replace(said, reasoning="")
        results = [
            {"role": "tool", "tool_call_id": call_id, "content": self.text(count)}
            for call_id in call_ids
        ]
        chat.messages += [self._turn_of(said, call_ids), *(results or [self.user(count)])]

    def empty(self) -> None:
        """Empty the cache, as an operator does."""
        self.desk.forget()
        self.desk.sessions.forget_lines()
        for asked in self.asked:
            asked.is_forgotten = True

    def restart(self) -> None:
        """Lose the KV, and have the conversations from where a restarted worker finds them."""
        self.desk.forget()
        for line in self.desk.sessions.lines.lines:
            line.is_restored = True
        self._happened.add("restarted")
