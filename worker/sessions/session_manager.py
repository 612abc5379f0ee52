"""Remembers and reports a worker's sessions: turns, thinking, conversation lines, and losses.

The prompt thread calls when a request arrives, the inference thread when the request has ended.
"""

import logging
import statistics
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from pathlib import Path
from typing import Any, Final

import numpy as np

from hearth.shared.our_ids import new_id
from hearth.shared.wire_messages import Prompt
from hearth.worker.cache.block_hash import Tokens, pack
from hearth.worker.sessions.cache_trace_log import TraceLog
from hearth.worker.sessions.conversation_lines import (
    REQUESTS_MAX,
    ConversationLines,
    Line,
    LineFacts,
    PromptShape,
    Session,
    first_user,
    match_line,
    shape_of,
)
from hearth.worker.sessions.echoed_turn_match import (
    CLAUDE_CODE,
    SessionFacts,
    TurnContent,
    directories_of_turns,
    is_trimmed,
    says_the_same,
    turn_content,
    working_directory,
)
from hearth.worker.sessions.session_archive import ArchiveEntry, SessionArchive
from hearth.worker.sessions.session_context import (
    CHANGED,
    DROPPED,
    KEPT,
    RENDERED,
    SLACK,
    Cause,
    Divergence,
    RequestEnding,
    SessionContext,
)
from hearth.worker.sessions.turn_store import (
    ThinkingStore,
    Turn,
    TurnStore,
    lookup_by_link,
    lookups_by_ids,
    thinking_key,
)

log = logging.getLogger(__name__)

REJECTED, UNEXPLAINED = "exact_key_rejected_by_model_lcp", "unexplained"  # a counter and its cause
SPEED_TOKENS_MIN = 16  # fewer tokens give no meaningful speed, also in /metrics
LOOKUPS_AT_ONCE = 64  # lookup keys searched before the lock is released
TREE_LINES_MAX: Final = 40  # most lines in a brief report, which has the last used lines
TREE_ROWS_MAX: Final = 160  # requests of all lines in a brief report
TREE_LINE_ROWS_MAX: Final = 40  # last requests of each line in a brief report

# A session in reports: (time of the last use, label, session, copies of the lines).
_ReportedSession = tuple[float, str, Session, list[Line]]


@dataclass(frozen=True, slots=True)
class SessionRules:
    """The settings of sessions. Immutable."""

    lines_max: int = 0  # most lines of one session; 0 = no limit
    idle_s: float = 0.0  # unused time until a session is forgotten; 0 = never
    ttl_s: float = 0.0  # unused time until KV leaves memory; 0 = never
    shows_text: bool = False  # whether logs and reports show snippets of prompts
    is_exact: bool = False  # whether only canonical KV is reused
    worker_id: int = 0
    model: str = ""  # the public name, for reports


class SessionManager:
    """The turns, thinking and conversation lines of one worker, under one lock. For any thread.

    Invariant: each context ends at most once, and results are written to `archive` in the order in
    which requests end. `turns`, `thinking` and `lines` change only under the lock.
    The lock is held only for steps whose cost does not grow with a prompt's messages or tokens.
    Longer searches read immutable copies without the lock. So the inference thread never waits for
    a prompt's preparation, and no thread waits for a disk.
    """

    def __init__(
        self, rules: SessionRules, log: TraceLog, slack: int, directory: Path | None = None
    ) -> None:
        """Restore the sessions in `directory`; with None, sessions are kept in memory only.

        Two prefill cuts are at most `slack` tokens apart.
        """
        self._rules = rules
        self._log = log
        self._slack = slack
        self._lock = threading.Lock()
        self.turns = TurnStore()
        self.thinking = ThinkingStore()
        self.lines = ConversationLines(rules.lines_max, rules.idle_s)
        self.new_id: Callable[[], str] = new_id
        self.counts: Counter[str] = Counter(canonical_drift=0, **{REJECTED: 0})
        self.archive = SessionArchive(directory, self.all_entries)
        self._restore(self.archive.load())

    # ------------------------------------------------------------ arrival

    def request_arrived(self, prompt: Prompt, is_kept: bool = True) -> SessionContext | None:
        """Return what is known about the request; None if the messages have no names.

        Without `is_kept`, also return None: the request then finds nothing and leaves nothing.
        """
        if not is_kept or len(prompt.names) != len(prompt.messages):
            return None
        speaker = replace(prompt.speaker, key=self.archive.journal.named(prompt.speaker.key))
        shape = shape_of(prompt)
        with self._lock:
            session = self.lines.session(speaker, time.monotonic())
            known = self.lines.snapshot(session)
        line_match = match_line(session, known, shape)
        context = SessionContext(prompt, speaker.key, line_match, list(prompt.messages), [], {})
        loaded_tools = _referenced_tools(prompt) if line_match.session.is_named else []
        with self._lock:
            self._record_session(context, loaded_tools)
        self._find_turns(context)
        return context

    def new_number(self) -> int:
        """Return an unused conversation number."""
        with self._lock:
            return self.lines.new_number()

    def _record_session(self, context: SessionContext, loaded_tools: list[str]) -> None:
        """Record the conversation, its kind, and the tools that it loads. The lock is held."""
        assert self._lock.locked()
        match = context.line_match
        session, names = match.session, match.shape.names
        # The digest of the first question distinguishes conversations.
        opening = names[first_user(match.shape)].exact if names else b""
        session.record_speaker(context.prompt.speaker, is_side=match.shape.is_side)
        session.loaded.update(dict.fromkeys(loaded_tools, opening))
        context.loaded = [
            name for name, tool_opening in session.loaded.items() if tool_opening != opening
        ]
        context.conversation = 0 if match.line is not None else self.lines.new_number()
        context.kind = "side" if match.is_side else _kind(session, match.line)

    def _find_turns(self, context: SessionContext) -> None:
        """Find the tokens of each assistant message, or else the thinking that was stripped off."""
        messages = context.prompt.messages
        facts = _session_facts(context.prompt)
        contents = {
            at: turn_content(message)
            for at, message in enumerate(messages)
            if message["role"] == "assistant"
        }
        command_directories = directories_of_turns(facts.directory, messages, contents)
        ids: dict[Any, str] = {}  # call id from the client -> call id sent to the client
        for at, message in enumerate(messages):
            turn = None
            if at in contents:
                echo, link = contents[at], context.line_match.links[at]
                turn_facts = replace(facts, directory=command_directories.get(at, ""))
                turn = self._find(context, at, echo, turn_facts)
                reasoning = turn.answer.reasoning if turn is not None else echo.reasoning
                if turn is None and not reasoning and context.states[at] != CHANGED:
                    key = thinking_key(context.api_key, link, echo)
                    with self._lock:
                        reasoning = self.thinking.get(key)
                    context.healed += bool(reasoning)
                if reasoning and not echo.reasoning:
                    context.messages[at] = message | {"reasoning_content": reasoning}
                    if turn is not None and not is_trimmed(turn.answer.content, echo.content):
                        # The client moved the thinking into the content; any other <think> is text.
                        context.messages[at]["content"] = turn.answer.content
                calls = message.get("tool_calls") or ()
                # Later results refer to the client's ids, which may count anew in each message.
                client_ids = recorded_ids = [call.get("id") for call in calls]
                if turn is not None and 0 < len(calls) == len(turn.call_ids):
                    recorded_ids = list(turn.call_ids)
                    renamed_calls = [
                        {**call, "id": call_id}
                        for call, call_id in zip(calls, recorded_ids, strict=True)
                    ]
                    context.messages[at] = context.messages[at] | {"tool_calls": renamed_calls}
                ids |= zip(client_ids, recorded_ids, strict=True)
            elif message.get("tool_call_id") in ids:
                context.messages[at] = message | {"tool_call_id": ids[message["tool_call_id"]]}
            context.turns.append(turn)

    def _find(
        self, context: SessionContext, at: int, echo: TurnContent, facts: SessionFacts
    ) -> Turn | None:
        """Return the turn that says what message `at` says, if there is exactly one such turn."""
        found = self._turns_under(lookups_by_ids(context.api_key, context.prompt.messages[at]))
        if not found:
            found = self._turns_under(
                [lookup_by_link(context.api_key, context.line_match.links[at])]
            )
        same = [turn for turn in found if is_echo(turn, echo, facts)]
        # A model may write the same id in several conversations: turns after these messages win.
        same = [turn for turn in same if turn.link == context.line_match.links[at]] or same
        if len({turn.ids.tobytes() for turn in same}) == 1:
            context.states[at] = KEPT
            return same[
                -1
            ]  # equal tokens may have several prefixes, if the client edited before them
        assert len(context.turns) == at, (len(context.turns), at)
        context.ambiguous += len(same) > 1
        context.states[at] = CHANGED if found and not same else RENDERED
        return None

    def _turns_under(self, lookups: Sequence[Hashable]) -> list[Turn]:
        """Return the turns under `lookups`. A message may have any number of lookup keys."""
        found: dict[Turn, None] = {}
        for start in range(0, len(lookups), LOOKUPS_AT_ONCE):
            with self._lock:
                turns = self.turns.find(lookups[start : start + LOOKUPS_AT_ONCE])
            found.update(dict.fromkeys(turns))
        return list(found)

    # ------------------------------------------------------------ end

    def request_ended(
        self, context: SessionContext, ending: RequestEnding
    ) -> dict[str, Any] | None:
        """Record the turn and advance the line; return what the request lost, if anything."""
        assert context.answer is None and context.turn is None, "the request has already ended"
        if context.prompt.continues:  # the continued message is the beginning of the answer
            beginning, answer = turn_content(context.messages[-1]), ending.answer
            content, reasoning = (
                beginning.content + answer.content,
                beginning.reasoning or answer.reasoning,
            )
            answer = replace(answer, reasoning=reasoning, content=content)
            ending = replace(ending, answer=answer, text=beginning.content + ending.text)
        now = time.monotonic()
        divergence = self._loss(context, ending)
        assert divergence is None or divergence.lost <= ending.usage.prefilled_tokens, divergence
        record = self._trace_record(context, ending)
        if divergence is not None:
            record["divergence"] = divergence.as_row(self._rules.shows_text)
            record[REJECTED] += divergence.cause.name == UNEXPLAINED
        if not ending.is_cancelled:
            context.answer = ending.answer
            if ending.is_whole and len(ending.sampled):
                context.turn = _turn(context, ending)
        tokens = np.concatenate([context.tokens, pack(list(ending.sampled))])
        with self._lock:
            self._count(context, divergence)
            if not ending.is_cancelled:
                if context.turn is not None:
                    self._remember(context.turn)
                self._write(context, tokens, record, now)
        if divergence is not None:
            log.info("lost request=%s %s", ending.request_id, record["divergence"])
        speaker = context.prompt.speaker  # a client's requests without a session share a file
        self._log.write(speaker.session or speaker.client, record)
        return divergence.as_row(True) if divergence is not None else None

    def _remember(self, turn: Turn) -> None:
        """Keep a turn and its thinking."""
        self.turns.add(turn)
        if turn.answer.reasoning:
            self.thinking.put(
                thinking_key(turn.api_key, turn.link, turn.answer), turn.answer.reasoning
            )

    def _write(
        self, context: SessionContext, tokens: Tokens, record: dict[str, Any], now: float
    ) -> None:
        """Write the request's results to its line and to the archive. The lock is held."""
        assert self._lock.locked()
        line = self.lines.advance(context.line_match, now, context.conversation)
        before = (line.shape, line.tokens) if line.turns else None
        if context.line_match.line is not line and context.line_match.earlier is not None:
            line.branch_token = context.shared
        self.lines.write(line, context.line_match.shape, tokens, len(context.tokens))
        assert context.turn is None or len(context.turn.ids) <= len(tokens)
        line.used_at, line.adapter = now, context.adapter
        line.facts = _facts_after(line.facts, context, record)
        line.title = line.title or context.prompt.speaker.title
        session = self.lines.session_of(line)
        context.kind = _kind(session, line)
        record |= {
            "line": line.number,
            "parent": line.parent.number if line.parent is not None else None,
            "kind": session.kind(line),
            "turn": line.turns,
        }
        line.rows.append(record)
        speaker, loaded = session.speaker, dict(session.loaded)
        self.archive.add(
            ArchiveEntry(time.time(), speaker, loaded, line.copy(), before, context.turn)
        )

    def _loss(self, context: SessionContext, ending: RequestEnding) -> Divergence | None:
        """Return the request's loss: because tokens differ, or else because KV was not kept."""
        usage, before = ending.usage, context.line_match.earlier
        cached, end = usage.cached_tokens, usage.cached_tokens + usage.prefilled_tokens
        if context.divergence and (found := context.divergence.within(cached, end)):
            return found
        if before is None or ending.is_cancelled:
            return None
        expected = min(context.shared, ending.limit, end)
        slack = self._slack + SLACK
        if (lost := expected - cached) <= slack:
            return None
        is_in_answer = cached + slack >= before.prompt_tokens
        idle_s = time.monotonic() - usage.finish_ms / 1000 - before.used_at
        is_expired = 0 < self._rules.ttl_s <= idle_s
        cause = "restart" if before.is_restored else "expired" if is_expired else "eviction"
        if before.adapter != context.adapter:
            cause = "other adapter"
        elif self._rules.is_exact and (is_in_answer or not ending.evictions):
            cause = "exact mode"  # the KV was generated, or prefilled by other cuts
        elif is_in_answer and context.states.get(len(before.shape.names), KEPT) != KEPT:
            cause = "turn not recorded"  # no prompt can resume at the end of the line
        return Divergence(Cause(cause, len(context.prompt.messages) - 1), cached, lost, "")

    def _count(self, context: SessionContext, divergence: Divergence | None) -> None:
        """Count the states of the request's turns, and the loss. The lock is held."""
        assert self._lock.locked()
        states = {state: context.count(state) for state in (KEPT, CHANGED, RENDERED, DROPPED)}
        others = {
            "healed": context.healed,
            "ambiguous": context.ambiguous,
            "doubtful": context.doubtful,
        }
        for name, count in (states | others).items():
            self.counts[f"turns_{name}"] += count
        if divergence is not None:
            self.counts["lost_tokens"] += divergence.lost
            self.counts["canonical_drift"] += divergence.cause.is_drift
            self.counts[REJECTED] += divergence.cause.name == UNEXPLAINED

    def _trace_record(self, context: SessionContext, ending: RequestEnding) -> dict[str, Any]:
        """Return the request's record of the trace log, without the prompt's text and title."""
        match, usage = context.line_match, ending.usage
        before = match.earlier.shape if match.earlier is not None else PromptShape()
        return {
            "at": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "worker": self._rules.worker_id,
            "request_id": ending.request_id,
            "session": context.prompt.speaker.label,
            "agent": match.session.speaker.agent,
            "messages": len(context.prompt.messages),
            "stable_prefix_msg_count": before.shared_names(match.shape),
            "cache_key_delta_chars": context.prompt.delta_chars,
            "rules": sorted({rule for name in context.prompt.names for rule in name.rules}),
            "prompt": usage.prompt_tokens,
            "cached": usage.cached_tokens,
            "prefilled": usage.prefilled_tokens,
            "source": usage.source,
            "match": usage.match,
            "completion": usage.completion_tokens,
            "reused_turns": context.count(KEPT),
            "healed_turns": context.healed,
            "changed_turns": context.count(CHANGED),
            "queue_ms": usage.queue_ms,
            "ttft_ms": usage.ttft_ms,
            "finish_ms": usage.finish_ms,
            **{name: int(name in ending.raised) for name in ("vlm_retreat", "hybrid_trim_miss")},
            REJECTED: 0,
            "divergence": None,
            "line": match.line.number if match.line is not None else None,
        }

    def forget_lines(self) -> None:
        """Forget all lines when the cache was emptied, so that no later request reports a loss."""
        with self._lock:
            self.lines.forget_lines()
            self.archive.add(ArchiveEntry(time.time(), forgets=True))

    def close(self) -> None:
        """Write the queues of the archive and of the trace log."""
        self.archive.journal.close()
        self._log.close()

    # ------------------------------------------------------------ reports

    def session_rows(self, api_key: str = "") -> list[dict[str, Any]]:
        """Return a row for each session of `api_key` ("" = all), most recently used first."""
        now = time.monotonic()
        found = sorted(self._reported(api_key), key=itemgetter(0), reverse=True)
        return [self._session_row(reported, now) for reported in found]

    def lines_report(
        self, label: str, api_key: str = "", is_brief: bool = False
    ) -> dict[str, Any] | None:
        """Return the lines of `api_key`'s ("" = all) sessions called `label`; None if none.

        `is_brief` leaves out older lines and requests, for a page that polls each second.
        """
        found = [reported for reported in self._reported(api_key) if label in ("", reported[1])]
        if not found:
            return None
        pairs = [(session, line) for *_, session, lines in found for line in lines]
        left, rows_max = sys.maxsize, REQUESTS_MAX
        if is_brief:
            left, rows_max = TREE_ROWS_MAX, TREE_LINE_ROWS_MAX
            pairs.sort(key=lambda pair: pair[1].used_at, reverse=True)
            del pairs[TREE_LINES_MAX:]
        reports = []
        for session, line in pairs:
            with self._lock:
                report = session.line_report(line, min(left, rows_max))
            left -= len(report["requests"])
            reports.append(report)
        return {"session": label, "lines": reports}

    def _reported(self, api_key: str) -> list[_ReportedSession]:
        """Return the sessions of `api_key` ("" = all).

        Lines of a session without an id are reported as separate sessions, one for each label.
        """
        owner = self.archive.journal.named(api_key) if api_key else ""
        found: list[_ReportedSession] = []
        with self._lock:
            for session in self.lines.sessions:
                if owner not in ("", session.speaker.key):
                    continue
                groups: dict[str, list[Line]] = {session.label: []} if session.is_named else {}
                for line in session.lines.values():
                    label = session.label if session.is_named else line.facts.label
                    groups.setdefault(label or session.label, []).append(line)
                for label, lines in groups.items():
                    ends = (line.used_at for line in lines)
                    used_at = session.used_at if session.is_named else max(ends)
                    found.append((used_at, label, session, lines))
        return found

    def _session_row(self, reported: _ReportedSession, now: float) -> dict[str, Any]:
        used_at, label, session, lines = reported
        first = min(lines, key=lambda line: line.number, default=None)
        last = max(lines, key=lambda line: line.used_at, default=None)
        facts = [line.facts for line in lines]
        speeds = [
            line_facts.decode_speed for line_facts in facts if line_facts.decode_speed is not None
        ]
        is_named = session.is_named
        return {
            "session": label,
            "agent": session.speaker.agent,
            "title": (session.title if is_named else "") or (first.title if first else ""),
            "client": (session.client if is_named else "") or (last.facts.client if last else ""),
            "model": self._rules.model,
            "begun_at": min(
                (line_facts.begun_at for line_facts in facts if line_facts.begun_at), default=None
            ),
            "lines": len(lines),
            "turns": sum(line.turns for line in lines),
            "lost": sum(line_facts.lost for line_facts in facts),
            "decode_speed": statistics.median(speeds) if speeds else None,
            "idle_s": round(now - used_at, 1),
        }

    # ------------------------------------------------------------ across restarts

    def _restore(self, entries: Iterable[ArchiveEntry]) -> None:
        """Restore the entries of earlier workers. Called before any thread uses this object."""
        for entry in entries:
            if entry.turn is not None:
                self._remember(entry.turn)
            if entry.thinking is not None:
                self.thinking.put(*entry.thinking)
            if entry.speaker is not None:
                used_at = time.monotonic() - max(0.0, time.time() - entry.at)
                self.lines.restore(entry.speaker, entry.loaded or {}, entry.line, used_at)

    def all_entries(self) -> Iterator[ArchiveEntry]:
        """Yield all remembered entries; each line is copied just before it is yielded.

        Runs on the journal writer's thread.
        """
        ahead = time.time() - time.monotonic()
        with self._lock:
            turns, thinking = list(self.turns), self.thinking.items()
            sessions = self.lines.sessions
        for session in sessions:
            with self._lock:
                used_at, lines = session.used_at, list(session.lines.values())
                speaker, loaded = session.speaker, dict(session.loaded)
            yield ArchiveEntry(used_at + ahead, speaker, loaded)
            for line in lines:
                with self._lock:
                    line = line.copy()
                yield ArchiveEntry(line.used_at + ahead, speaker, loaded, line)
        thinking_of_turns: dict[bytes, str] = {}
        for turn in turns:
            if turn.answer.reasoning:
                thinking_of_turns[thinking_key(turn.api_key, turn.link, turn.answer)] = (
                    turn.answer.reasoning
                )
            yield ArchiveEntry(turn.made_at, turn=turn)
        for name, text in thinking:
            if thinking_of_turns.get(name) != text:
                yield ArchiveEntry(0.0, thinking=(name, text))

    def counters(self) -> dict[str, Any]:
        """Return the counters, and the numbers and sizes of the stores."""
        with self._lock:
            sizes = {"turns": len(self.turns), "turn_bytes": self.turns.nbytes}
            counts = dict(self.counts)
        return {**counts, **sizes, "archive": self.archive.report()}


def _kind(session: Session, line: Line | None) -> str:
    """Return the kind of a line; a branch has the kind of its root. None = a new line."""
    if line is None:
        return "agent" if session.is_agent else "main"
    while line.parent is not None:
        line = line.parent
    kind = session.kind(line)
    return "agent" if kind == "sub-agent" else kind


def _facts_after(
    before: LineFacts, context: SessionContext, record: Mapping[str, Any]
) -> LineFacts:
    """Return a line's facts after a request with the trace record `record`."""
    speaker, speed = context.prompt.speaker, before.decode_speed
    lost: int = (record["divergence"] or {}).get("lost", 0)
    tokens, decode_ms = record["completion"], record["finish_ms"] - record["ttft_ms"]
    if tokens > SPEED_TOKENS_MIN and decode_ms > 0:  # tokens per second, after the first token
        speed = round((tokens - 1) * 1000 / decode_ms, 1) or speed
    return LineFacts(
        label=speaker.label,
        client=speaker.client_name,
        begun_at=before.begun_at or round(context.arrived_at, 3),
        lost=before.lost + lost,
        decode_speed=speed,
    )


def _referenced_tools(prompt: Prompt) -> list[str]:
    """Return the deferred tools that the conversation references.

    A tool that the session loaded is shown again in a conversation that lost the reference, but not
    in the same conversation if that was rewound to a point before the reference.
    """
    listed = {tool["function"]["name"] for tool in prompt.deferred}
    references = (message.get("tool_references") or () for message in prompt.messages)
    return [name for names in references for name in names if name in listed]


def _turn(context: SessionContext, ending: RequestEnding) -> Turn:
    """Return the request's answer as a turn."""
    assert context.header <= len(context.tokens), (context.header, len(context.tokens))
    return Turn(
        api_key=context.api_key,
        link=context.line_match.links[-2 if context.prompt.continues else -1],
        ids=np.concatenate([context.tokens[context.header :], pack(list(ending.sampled))]),
        answer=ending.answer,
        text=ending.text,
        call_ids=ending.call_ids,
        signature=ending.signature if ending.answer.reasoning else "",
        made_at=time.time(),
        prefix=context.prefix,
    )


def _session_facts(prompt: Prompt) -> SessionFacts:
    functions = (tool["function"] for tool in (*prompt.tools, *prompt.deferred))
    schemas = {function["name"]: function.get("parameters") or {} for function in functions}
    client = prompt.speaker.client
    directory = working_directory(prompt.messages) if client == CLAUDE_CODE else ""
    return SessionFacts(schemas, client, directory)


def is_echo(turn: Turn, echo: TurnContent, facts: SessionFacts) -> bool:
    """Return whether an echo says what the turn said, compared as written text or as parsed."""
    is_written = not (echo.calls or echo.reasoning) and is_trimmed(turn.text, echo.content)
    return is_written or says_the_same(turn.answer, echo, facts)
