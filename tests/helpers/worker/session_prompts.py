"""Leads conversations through a session manager with a tokenizer of words."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hearth.proxy.request.message_digests import MessageDigester
from hearth.shared.wire_messages import Prompt, Speaker, Usage
from hearth.worker.cache.block_hash import pack
from hearth.worker.sessions.cache_trace_log import TraceLog, TraceRecord
from hearth.worker.sessions.echoed_turn_match import TurnContent
from hearth.worker.sessions.session_context import RequestEnding, SessionContext
from hearth.worker.sessions.session_manager import SessionManager, SessionRules
from hearth.worker.sessions.turn_store import TurnStore

HEADER = [7, 7]  # the tokens of a generation prompt
SLACK = 64
ME = Speaker("key", "s1")
QUESTION = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "fix it"}]
READ = ("read", {"path": "/a", "limit": 5000.0})
SAID = TurnContent("I look first", "Let me check.", (READ,))
WORDS = TurnContent("hard", "All is well.", ())


class Rows(TraceLog):
    """A trace log that keeps its rows here."""

    def __init__(self) -> None:
        super().__init__(Path(), is_on=False)
        self.rows: list[tuple[str, TraceRecord]] = []

    def write(self, session: str, row: TraceRecord) -> None:
        self.rows.append((session, row))


class Desk:
    """Sessions, and a model whose every answer is scripted."""

    def __init__(self, **rules: Any) -> None:
        self.log = Rows()
        self.sessions = SessionManager(SessionRules(**rules), self.log, SLACK)
        self.names = MessageDigester(True, False)

    def arrive(
        self, messages: Sequence[dict[str, Any]], speaker: Speaker = ME, **more: Any
    ) -> SessionContext:
        prompt = Prompt(list(messages), speaker=speaker, **more)
        visit = self.sessions.request_arrived(
            replace(prompt, names=self.names.names(prompt.messages)[0])
        )
        assert visit is not None
        prompt_tokens = [100 + at for at in range(10 * len(messages))] + HEADER
        known = frozenset(at for at, turn in enumerate(visit.turns) if turn is not None)
        visit.set_prompt(pack(prompt_tokens), len(prompt_tokens) - len(HEADER), known)
        return visit

    def end(
        self,
        visit: SessionContext,
        said: TurnContent,
        sampled: Sequence[int] = (1, 2, 3),
        text: str = "",
        **more: Any,
    ) -> dict[str, Any] | None:
        text = text or f"{said}"
        given = {
            "call_ids": tuple(self.sessions.new_id() for _ in said.calls),
            "signature": self.sessions.new_id(),
        }
        prompt = len(visit.tokens)
        cached = more.pop("cached", prompt)
        usage = Usage(prompt, cached, prompt - cached, len(sampled))
        row: dict[str, Any] = {"limit": len(visit.tokens), "is_whole": True, **given, **more}
        return self.sessions.request_ended(
            visit, RequestEnding("r1", text, said, sampled, usage, **row)
        )

    def ask(
        self,
        messages: Sequence[dict[str, Any]],
        said: TurnContent,
        sampled: Sequence[int] = (1, 2, 3),
        speaker: Speaker = ME,
        **more: Any,
    ) -> SessionContext:
        visit = self.arrive(messages, speaker)
        self.end(visit, said, sampled, **more)
        return visit

    def forget_turns(self) -> None:
        """As after a restart: of the stores, only the healing store is full."""
        self.sessions.turns = TurnStore()


def echo(said: TurnContent, call_ids: Sequence[str] = (), **changes: Any) -> dict[str, Any]:
    """Return the answer as a client sends it back that keeps everything."""
    message: dict[str, Any] = {"role": "assistant", "content": said.content}
    if said.reasoning:
        message["reasoning_content"] = said.reasoning
    if said.calls:
        ids = [*call_ids, *(f"theirs{n}" for n in range(len(said.calls)))]
        message["tool_calls"] = [
            {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
            for call_id, (name, arguments) in zip(ids, said.calls, strict=False)
        ]
    return message | changes
