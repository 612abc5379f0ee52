"""Remembers a worker's sessions: turns, thinking, conversation lines, and what each request lost.

It reports them too: what they are, by whom, since when.

The prompt thread asks when a request arrives; the inference thread reports when it ended.
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
    position_in,
    shape_of,
)
from hearth.worker.sessions.echoed_turn_match import (
    CLAUDE_CODE,
    Known,
    TurnContent,
    directories,
    is_trimmed,
    says_the_same,
    turn_content,
    working_directory,
)
from hearth.worker.sessions.session_archive import ArchiveEntry, SessionArchive
from hearth.worker.sessions.session_visit import (
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
    place_behind,
    places_of_ids,
    thinking_key,
)

log = logging.getLogger(__name__)

REJECTED, UNEXPLAINED = "exact_key_rejected_by_model_lcp", "unexplained"  # counter, its cause
SPEED_TOKENS_MIN = 16  # as in /metrics: the speed of fewer says nothing
PLACES_AT_ONCE = 64  # at which turns are looked for before the lock is let go
TREE_LINES_MAX: Final = 40  # of a session that is reported in brief, the most recently used
TREE_ROWS_MAX: Final = 160  # of all of them together
TREE_LINE_ROWS_MAX: Final = 40  # of each, the last

# One session as it is reported: when it was last used, its label, and its lines of one moment.
_Told = tuple[float, str, Session, list[Line]]


@dataclass(frozen=True, slots=True)
class SessionRules:
    """The settings that are about sessions. Immutable."""

    lines_max: int = 0  # of one session, 0 = no cap
    idle_s: float = 0.0  # until a session is forgotten, 0 = never
    ttl_s: float = 0.0  # until unused KV leaves memory, 0 = never
    shows_text: bool = False  # snippets of prompts in logs and reports
    is_exact: bool = False  # only what was prefilled is reused
    worker_id: int = 0
    model: str = ""  # the public name, for reports


class SessionManager:
    """The turns, thinking and conversation lines of one worker, under one lock. Any thread.

    Invariant: each visit ends at most once, and what it leaves is written to `archive` in the order
    in which requests end. `turns`, `thinking` and `lines` are changed under the lock alone.
    The lock is held for steps whose cost grows neither with a prompt's messages nor its tokens:
    what is long searches copies of what is kept, all of which is immutable. So the inference thread
    waits for no prompt's work, and nobody for a disk.
    """

    def __init__(
        self, rules: SessionRules, log: TraceLog, slack: int, directory: Path | None = None
    ) -> None:
        """Take up what is remembered in `directory`; None remembers in memory only.

        Prefills are cut at most `slack` tokens apart.
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

    def arrive(self, prompt: Prompt, is_kept: bool = True) -> SessionContext | None:
        """Return what is known about the request; None where its messages are not named.

        None also where it is not to be kept: it finds nothing, and nothing will be recorded of it.
        """
        if not is_kept or len(prompt.names) != len(prompt.messages):
            return None
        speaker = replace(prompt.speaker, key=self.archive.journal.named(prompt.speaker.key))
        shape = shape_of(prompt)
        with self._lock:
            session = self.lines.session(speaker, time.monotonic())
            known = self.lines.snapshot(session)
        place = position_in(session, known, shape)
        visit = SessionContext(prompt, speaker.key, place, list(prompt.messages), [], {})
        loads = _loads(prompt) if place.session.is_named else []
        with self._lock:
            self._note_session(visit, loads)
        self._find_turns(visit)
        return visit

    def new_number(self) -> int:
        """Return the number of another conversation."""
        with self._lock:
            return self.lines.new_number()

    def _note_session(self, visit: SessionContext, loads: list[str]) -> None:
        """Note the conversation and its kind, and that it loads tools. The lock is held."""
        assert self._lock.locked()
        place = visit.place
        session, names = place.session, place.shape.names
        # The digest of the first question tells conversations apart.
        opening = names[first_user(place.shape)].exact if names else b""
        session.note_speaker(visit.prompt.speaker, is_side=place.shape.is_side)
        session.loaded.update(dict.fromkeys(loads, opening))
        visit.loaded = [name for name, where in session.loaded.items() if where != opening]
        visit.conversation = 0 if place.line is not None else self.lines.new_number()
        visit.kind = "side" if place.is_side else _kind(session, place.line)

    def _find_turns(self, visit: SessionContext) -> None:
        """Find the tokens of each assistant message, or else the thinking it was stripped of."""
        messages = visit.prompt.messages
        known = _known(visit.prompt)
        contents = {
            at: turn_content(each)
            for at, each in enumerate(messages)
            if each["role"] == "assistant"
        }
        run_in = directories(known.directory, messages, contents)
        ids: dict[Any, str] = {}  # of calls: as the client sends one -> as it was given it
        for at, message in enumerate(messages):
            turn = None
            if at in contents:
                said, place = contents[at], visit.place.links[at]
                here = replace(known, directory=run_in.get(at, ""))
                turn = self._find(visit, at, said, here)
                reasoning = turn.said.reasoning if turn is not None else said.reasoning
                if turn is None and not reasoning and visit.states[at] != CHANGED:
                    name = thinking_key(visit.api_key, place, said)
                    with self._lock:
                        reasoning = self.thinking.get(name)
                    visit.healed += bool(reasoning)
                if reasoning and not said.reasoning:
                    visit.messages[at] = message | {"reasoning_content": reasoning}
                    if turn is not None and not is_trimmed(turn.said.content, said.content):
                        # The client moved it there: else a <think> in a content is text.
                        visit.messages[at]["content"] = turn.said.content
                calls = message.get("tool_calls") or ()
                # A client that numbers the calls of each message anew means these from here on.
                given = shown = [call.get("id") for call in calls]
                if turn is not None and 0 < len(calls) == len(turn.call_ids):
                    shown = list(turn.call_ids)
                    rows = [{**call, "id": each} for call, each in zip(calls, shown, strict=True)]
                    visit.messages[at] = visit.messages[at] | {"tool_calls": rows}
                ids |= zip(given, shown, strict=True)
            elif message.get("tool_call_id") in ids:
                visit.messages[at] = message | {"tool_call_id": ids[message["tool_call_id"]]}
            visit.turns.append(turn)

    def _find(self, visit: SessionContext, at: int, said: TurnContent, known: Known) -> Turn | None:
        """Return the one turn that says what message `at` says, if there is one."""
        found = self._turns_at(places_of_ids(visit.api_key, visit.prompt.messages[at]))
        if not found:
            found = self._turns_at([place_behind(visit.api_key, visit.place.links[at])])
        same = [turn for turn in found if is_echo(turn, said, known)]
        # A model may write one id in several conversations: the turn of this place goes first.
        same = [turn for turn in same if turn.place == visit.place.links[at]] or same
        if len({turn.ids.tobytes() for turn in same}) == 1:
            visit.states[at] = KEPT
            return same[-1]  # what the same was sampled behind changes where a client edits
        assert len(visit.turns) == at, (len(visit.turns), at)
        visit.ambiguous += len(same) > 1
        visit.states[at] = CHANGED if found and not same else RENDERED
        return None

    def _turns_at(self, places: Sequence[Hashable]) -> list[Turn]:
        """Return the turns that are listed at `places`, which a message may have any number of."""
        found: dict[Turn, None] = {}
        for start in range(0, len(places), PLACES_AT_ONCE):
            with self._lock:
                turns = self.turns.find(places[start : start + PLACES_AT_ONCE])
            found.update(dict.fromkeys(turns))
        return list(found)

    # ------------------------------------------------------------ end

    def ended(self, visit: SessionContext, ending: RequestEnding) -> dict[str, Any] | None:
        """Record the turn and advance the line; return what the request lost, if anything."""
        assert visit.said is None and visit.turn is None, "a visit ends once"
        if visit.prompt.continues:  # the message that it continued stands in front of the answer
            begun, said = turn_content(visit.messages[-1]), ending.said
            content, reasoning = begun.content + said.content, begun.reasoning or said.reasoning
            said = replace(said, reasoning=reasoning, content=content)
            ending = replace(ending, said=said, text=begun.content + ending.text)
        now = time.monotonic()
        divergence = self._loss(visit, ending)
        assert divergence is None or divergence.lost <= ending.usage.prefilled_tokens, divergence
        row = self._row(visit, ending)
        if divergence is not None:
            row["divergence"] = divergence.as_row(self._rules.shows_text)
            row[REJECTED] += divergence.cause.name == UNEXPLAINED
        if not ending.is_cancelled:
            visit.said = ending.said
            if ending.is_whole and len(ending.sampled):
                visit.turn = _turn(visit, ending)
        tokens = np.concatenate([visit.tokens, pack(list(ending.sampled))])
        with self._lock:
            self._count(visit, divergence)
            if not ending.is_cancelled:
                if visit.turn is not None:
                    self._remember(visit.turn)
                self._write(visit, tokens, row, now)
        if divergence is not None:
            log.info("lost request=%s %s", ending.request_id, row["divergence"])
        speaker = visit.prompt.speaker  # those without a session share a file of their client
        self._log.write(speaker.session or speaker.client, row)
        return divergence.as_row(True) if divergence is not None else None

    def _remember(self, turn: Turn) -> None:
        """Keep a turn and its thinking."""
        self.turns.add(turn)
        if turn.said.reasoning:
            self.thinking.put(
                thinking_key(turn.api_key, turn.place, turn.said), turn.said.reasoning
            )

    def _write(
        self, visit: SessionContext, tokens: Tokens, row: dict[str, Any], now: float
    ) -> None:
        """Write what the request left to its line, and the archive. The lock is held."""
        assert self._lock.locked()
        line = self.lines.advance(visit.place, now, visit.conversation)
        was = (line.shape, line.tokens) if line.turns else None
        if visit.place.line is not line and visit.place.before is not None:
            line.branch_token = visit.shared
        self.lines.write(line, visit.place.shape, tokens, len(visit.tokens))
        assert visit.turn is None or len(visit.turn.ids) <= len(tokens)
        line.used_at, line.adapter = now, visit.adapter
        line.about = _facts_after(line.about, visit, row)
        line.title = line.title or visit.prompt.speaker.title
        session = self.lines.session_of(line)
        visit.kind = _kind(session, line)
        row |= {
            "line": line.number,
            "parent": line.parent.number if line.parent is not None else None,
            "kind": session.kind(line),
            "turn": line.turns,
        }
        line.rows.append(row)
        speaker, loaded = session.speaker, dict(session.loaded)
        self.archive.add(ArchiveEntry(time.time(), speaker, loaded, line.copy(), was, visit.turn))

    def _loss(self, visit: SessionContext, ending: RequestEnding) -> Divergence | None:
        """Return what the request read again: by other tokens, or else by what was not kept."""
        usage, before = ending.usage, visit.place.before
        at, fed = usage.cached_tokens, usage.cached_tokens + usage.prefilled_tokens
        if visit.divergence and (found := visit.divergence.within(at, fed)):
            return found
        if before is None or ending.is_cancelled:
            return None
        expected = min(visit.shared, ending.limit, fed)
        slack = self._slack + SLACK
        if (lost := expected - at) <= slack:
            return None
        is_answers = at + slack >= before.prompt_tokens
        idle_s = time.monotonic() - usage.finish_ms / 1000 - before.used_at
        is_expired = 0 < self._rules.ttl_s <= idle_s
        cause = "restart" if before.is_restored else "expired" if is_expired else "eviction"
        if before.adapter != visit.adapter:
            cause = "other adapter"
        elif self._rules.is_exact and (is_answers or not ending.evictions):
            cause = "exact mode"  # what was generated, or prefilled by other cuts
        elif is_answers and visit.states.get(len(before.shape.names), KEPT) != KEPT:
            cause = "turn not recorded"  # its end was no place to go on from
        return Divergence(Cause(cause, len(visit.prompt.messages) - 1), at, lost, "")

    def _count(self, visit: SessionContext, divergence: Divergence | None) -> None:
        """Count what became of the request's turns, and what it lost. The lock is held."""
        assert self._lock.locked()
        states = {state: visit.count(state) for state in (KEPT, CHANGED, RENDERED, DROPPED)}
        others = {"healed": visit.healed, "ambiguous": visit.ambiguous, "doubtful": visit.doubtful}
        for name, count in (states | others).items():
            self.counts[f"turns_{name}"] += count
        if divergence is not None:
            self.counts["lost_tokens"] += divergence.lost
            self.counts["canonical_drift"] += divergence.cause.is_drift
            self.counts[REJECTED] += divergence.cause.name == UNEXPLAINED

    def _row(self, visit: SessionContext, ending: RequestEnding) -> dict[str, Any]:
        """Return the request's line of the trace log. No text of the prompt, nor its title."""
        place, usage = visit.place, ending.usage
        before = place.before.shape if place.before is not None else PromptShape()
        return {
            "at": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "worker": self._rules.worker_id,
            "request_id": ending.request_id,
            "session": visit.prompt.speaker.label,
            "agent": place.session.speaker.agent,
            "messages": len(visit.prompt.messages),
            "stable_prefix_msg_count": before.shared_names(place.shape),
            "cache_key_delta_chars": visit.prompt.delta_chars,
            "rules": sorted({rule for name in visit.prompt.names for rule in name.rules}),
            "prompt": usage.prompt_tokens,
            "cached": usage.cached_tokens,
            "prefilled": usage.prefilled_tokens,
            "source": usage.source,
            "match": usage.match,
            "completion": usage.completion_tokens,
            "reused_turns": visit.count(KEPT),
            "healed_turns": visit.healed,
            "changed_turns": visit.count(CHANGED),
            "queue_ms": usage.queue_ms,
            "ttft_ms": usage.ttft_ms,
            "finish_ms": usage.finish_ms,
            **{name: int(name in ending.raised) for name in ("vlm_retreat", "hybrid_trim_miss")},
            REJECTED: 0,
            "divergence": None,
            "line": place.line.number if place.line is not None else None,
        }

    def forget_lines(self) -> None:
        """Forget all lines as the cache was emptied: no later request loses anything by that."""
        with self._lock:
            self.lines.forget_lines()
            self.archive.add(ArchiveEntry(time.time(), forgets=True))

    def close(self) -> None:
        """Write what the archive and the trace log still hold."""
        self.archive.journal.close()
        self._log.close()

    # ------------------------------------------------------------ reports

    def session_rows(self, key: str = "") -> list[dict[str, Any]]:
        """Return a row for each session of `key`, "" = all, the most recently used first."""
        now = time.monotonic()
        found = sorted(self._reported(key), key=itemgetter(0), reverse=True)
        return [self._session_row(told, now) for told in found]

    def lines_report(
        self, label: str, key: str = "", is_brief: bool = False
    ) -> dict[str, Any] | None:
        """Return the lines of the sessions called `label` of `key`, "" = all; None of none.

        `is_brief`: the newest of them, for a page that asks each second.
        """
        found = [told for told in self._reported(key) if label in ("", told[1])]
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

    def _reported(self, key: str) -> list[_Told]:
        """Return the sessions of `key`, "" = all.

        A conversation whose client names no session is one of its own, told by its lines' labels.
        """
        owner = self.archive.journal.named(key) if key else ""
        found: list[_Told] = []
        with self._lock:
            for session in self.lines.sessions:
                if owner not in ("", session.speaker.key):
                    continue
                groups: dict[str, list[Line]] = {session.label: []} if session.is_named else {}
                for line in session.lines.values():
                    label = session.label if session.is_named else line.about.label
                    groups.setdefault(label or session.label, []).append(line)
                for label, lines in groups.items():
                    ends = (line.used_at for line in lines)
                    used_at = session.used_at if session.is_named else max(ends)
                    found.append((used_at, label, session, lines))
        return found

    def _session_row(self, told: _Told, now: float) -> dict[str, Any]:
        used_at, label, session, lines = told
        first = min(lines, key=lambda line: line.number, default=None)
        last = max(lines, key=lambda line: line.used_at, default=None)
        facts = [line.about for line in lines]
        speeds = [each.decode_speed for each in facts if each.decode_speed is not None]
        is_named = session.is_named
        return {
            "session": label,
            "agent": session.speaker.agent,
            "title": (session.title if is_named else "") or (first.title if first else ""),
            "client": (session.client if is_named else "") or (last.about.client if last else ""),
            "model": self._rules.model,
            "begun_at": min((each.begun_at for each in facts if each.begun_at), default=None),
            "lines": len(lines),
            "turns": sum(line.turns for line in lines),
            "lost": sum(each.lost for each in facts),
            "decode_speed": statistics.median(speeds) if speeds else None,
            "idle_s": round(now - used_at, 1),
        }

    # ------------------------------------------------------------ across restarts

    def _restore(self, memory: Iterable[ArchiveEntry]) -> None:
        """Take up what earlier workers left. Before any thread uses this object."""
        for entry in memory:
            if entry.turn is not None:
                self._remember(entry.turn)
            if entry.thinking is not None:
                self.thinking.put(*entry.thinking)
            if entry.speaker is not None:
                used_at = time.monotonic() - max(0.0, time.time() - entry.at)
                self.lines.restore(entry.speaker, entry.loaded or {}, entry.line, used_at)

    def all_entries(self) -> Iterator[ArchiveEntry]:
        """Yield all that is remembered, each line as it is when its turn comes.

        The journal writer's thread.
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
        brought: dict[bytes, str] = {}
        for turn in turns:
            if turn.said.reasoning:
                brought[thinking_key(turn.api_key, turn.place, turn.said)] = turn.said.reasoning
            yield ArchiveEntry(turn.made_at, turn=turn)
        for name, text in thinking:
            if brought.get(name) != text:
                yield ArchiveEntry(0.0, thinking=(name, text))

    def counters(self) -> dict[str, Any]:
        """Return the counters and what is remembered."""
        with self._lock:
            held = {"turns": len(self.turns), "turn_bytes": self.turns.nbytes}
            counts = dict(self.counts)
        return {**counts, **held, "archive": self.archive.report()}


def _kind(session: Session, line: Line | None) -> str:
    """Return the kind of a line: for a branch that of its root; None stands for a new line."""
    if line is None:
        return "agent" if session.is_agent else "main"
    while line.parent is not None:
        line = line.parent
    kind = session.kind(line)
    return "agent" if kind == "sub-agent" else kind


def _facts_after(before: LineFacts, visit: SessionContext, row: Mapping[str, Any]) -> LineFacts:
    """Return what a line is known by after a request, whose trace row is `row`."""
    speaker, speed = visit.prompt.speaker, before.decode_speed
    lost: int = (row["divergence"] or {}).get("lost", 0)
    tokens, decode_ms = row["completion"], row["finish_ms"] - row["ttft_ms"]
    if tokens > SPEED_TOKENS_MIN and decode_ms > 0:  # a second, after the first
        speed = round((tokens - 1) * 1000 / decode_ms, 1) or speed
    return LineFacts(
        label=speaker.label,
        client=speaker.client_name,
        begun_at=before.begun_at or round(visit.arrived_at, 3),
        lost=before.lost + lost,
        decode_speed=speed,
    )


def _loads(prompt: Prompt) -> list[str]:
    """Return the deferred tools that the conversation loads.

    One that its session loaded is shown again where that conversation is gone, not where it goes
    back to before the tool was loaded.
    """
    listed = {tool["function"]["name"] for tool in prompt.deferred}
    rows = (row.get("tool_references") or () for row in prompt.messages)
    return [name for names in rows for name in names if name in listed]


def _turn(visit: SessionContext, ending: RequestEnding) -> Turn:
    """Return the turn that the request's answer is."""
    assert visit.header <= len(visit.tokens), (visit.header, len(visit.tokens))
    return Turn(
        api_key=visit.api_key,
        place=visit.place.links[-2 if visit.prompt.continues else -1],
        ids=np.concatenate([visit.tokens[visit.header :], pack(list(ending.sampled))]),
        said=ending.said,
        text=ending.text,
        call_ids=ending.call_ids,
        signature=ending.signature if ending.said.reasoning else "",
        made_at=time.time(),
        begins=visit.begins,
    )


def _known(prompt: Prompt) -> Known:
    functions = (tool["function"] for tool in (*prompt.tools, *prompt.deferred))
    schemas = {row["name"]: row.get("parameters") or {} for row in functions}
    client = prompt.speaker.client
    directory = working_directory(prompt.messages) if client == CLAUDE_CODE else ""
    return Known(schemas, client, directory)


def is_echo(turn: Turn, said: TurnContent, known: Known) -> bool:
    """Whether an echo says what the turn said: as it was written, or as it was parsed."""
    is_written = not (said.calls or said.reasoning) and is_trimmed(turn.text, said.content)
    return is_written or says_the_same(turn.said, said, known)
