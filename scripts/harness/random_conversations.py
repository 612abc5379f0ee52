"""Plays random conversations: they grow, are cut back, edited, forked and mixed.

A plan is a value of whole numbers, so that hypothesis, a seed or a person can make one. Each step
changes what a client would send, and sends it.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from scripts.harness.chat_client import Asked, Body, Chat, ChatClient, Variant

NUMBER_MAX: Final = 255  # of the numbers in a plan
# Steps behind the last answer, which the conversation takes up; steps that leave it out; and edits
# of the history, which mostly take it up.
GOES_ON: Final = (
    *("append", "idle", "emptied", "restarted", "renamed", "left", "twice", "parallel", "imported"),
    *("compact", "option", "stripped", "stopped", "rewritten"),
)
GOES_BACK: Final = ("retry", "unanswered", "cut", "cut_and_ask", "fork", "agent", "clear")
EDITS: Final = ("edit", "truncate", "date", "insert", "remove", "swap", "tools")
STEPS: Final = (*GOES_ON, *GOES_BACK, *EDITS)
NEW: Final = frozenset(("clear", "fork", "agent"))  # begin beside another one

VARIANTS: Final = (
    Variant("qwen3"),
    Variant("qwen3_5", "hybrid"),
    Variant("chatml", calls=False),
    Variant("harmony", "windowed"),
    Variant("glm4", chunk=64),
    Variant("qwen3", "hybrid", chunk=64),
    Variant("qwen3", preserves_thinking=False),
    Variant("qwen3", chunk=64, is_exact=True),
    Variant("qwen3", chunk=64, budget_mb=0.004, slots=1),  # rows have eight bytes
)


@dataclass(frozen=True)
class Step:
    """What a client does next. The numbers choose among what there is, modulo its count."""

    kind: str
    chat: int = 0
    place: int = 0
    other: int = 0

    @property
    def count(self) -> int:
        """Words of what is said."""
        return 2 + self.other % 23


@dataclass(frozen=True)
class Plan:
    """One random conversation, or several at once."""

    variant: Variant
    steps: tuple[Step, ...]
    is_named: bool = True  # its client sends a session id
    rounds: int = 1  # of the first conversation as it is first sent
    tools: int = 2


class Player(ChatClient):
    """Plays one plan."""

    def __init__(self, plan: Plan, logs: Path) -> None:
        super().__init__(plan.variant, plan.tools, logs)
        self.plan = plan

    def play(self) -> list[Asked]:
        """Return every request that was answered."""
        opening = self.import_history(self.plan.is_named, self.plan.rounds)
        if self.ask("import" if self.plan.rounds > 1 else "new", [opening]):
            self.chats.append(opening)
            for step in self.plan.steps:
                self._take_step(step)
        return self.asked

    def _take_step(self, step: Step) -> None:
        """Change a fork of a conversation, and send it with what else is sent at once."""
        assert step.kind in STEPS, step.kind
        was = self.chats[step.chat % len(self.chats)]
        chat = was.fork()
        if step.kind in GOES_ON or (step.kind in EDITS and step.other % 4):
            self.take(chat, was.last, step.count)
        changes = {GOES_ON: self._go_on, GOES_BACK: self._go_back, EDITS: self._edit}
        sent = next(play(chat, step, was) for kinds, play in changes.items() if step.kind in kinds)
        is_new = step.kind in NEW
        sent[0].last = None if is_new else was.last
        if self.ask(step.kind, sent):
            at = self.chats.index(was)
            self.chats[at : at + (not is_new)] = sent

    def _go_on(self, chat: Chat, step: Step, was: Chat) -> list[Chat]:
        match step.kind:
            case "idle":  # the worker has time before the next request
                self.desk.idle()
            case "emptied":  # so is the cache, before the next request
                self.empty()
            case "restarted":  # so is the worker
                self.restart()
            case "renamed":  # the client goes on under another session's id
                chat.session = chat.session and f"r{len(self.asked)}"
            case "left":  # the client leaves while it is answered, and asks again
                self.leave(chat, was.last)
            case "twice":  # the client sends one request twice at once
                return [chat, chat.fork()]
            case "parallel":  # the conversation goes on while two forks of it ask something else
                forks = [was.fork() for _ in range(2)]
                for each in forks:
                    each.messages.append(self.user(step.count))
                return [chat, *forks]
            case "imported":  # another one is sent with a long history; this one goes on
                made = self.import_history(bool(chat.session), 2 + step.place % 8)
                made.session = chat.session if step.other % 2 else made.session
                return [chat, made]
            case "compact":  # a summary stands in the place of all but the last questions
                users, kept = chat.at("user"), step.place % 3
                tail = chat.messages[users[-kept] :] if 0 < kept < len(users) else []
                chat.messages = [*chat.head, self.user(step.count + 8), *tail]
            case "option":  # of the template; it changes
                chat.options["enable_thinking"] = not chat.options.get("enable_thinking", True)
            case "stripped":  # from now on the client sends no thinking, neither of earlier answers
                chat.echoes_thinking = False
                for message in chat.messages:
                    message.pop("reasoning_content", None)
            case "stopped":  # the next answer is cut by a stop string
                chat.stops = True
            case "rewritten":  # the client takes the last answer up with another word in it
                self._put_word(chat.messages[len(was.messages)], step.place)
        return [chat]

    def _go_back(self, chat: Chat, step: Step, was: Chat) -> list[Chat]:
        users = chat.at("user")
        place = users[step.place % len(users)]
        match step.kind:
            case "unanswered":  # the client leaves the last answer out
                chat.messages.append(self.user(step.count))
            case "cut":  # the conversation ends at an earlier question, as it was asked
                del chat.messages[place + 1 :]
            case "cut_and_ask":  # another question stands where an earlier one stood, and is last
                chat.messages[place:] = [self.user(step.count)]
            case "fork":  # another conversation goes on from an earlier answer of this one
                turns = [at for at in chat.at("assistant") if "tool_calls" not in chat.messages[at]]
                if turns:
                    del chat.messages[turns[step.place % len(turns)] + 1 :]
                chat.messages.append(self.user(step.count))
                if not step.other % 2:
                    chat.session = chat.session and f"f{len(self.asked)}"
            case "agent":  # a sub-agent of the same session begins; its client may say it is one
                messages = [self.system(4 + step.place % 8), self.user(step.count)]
                name = f"a{len(self.asked)}" if step.other % 2 and chat.session else ""
                return [Chat(chat.session, messages, chat.tools[: step.place % 3], name)]
            case "clear":  # another one with the same head begins in the same session
                return [Chat(chat.session, [*chat.head, self.user(step.count)], chat.tools)]
        return [chat]

    def _edit(self, chat: Chat, step: Step, was: Chat) -> list[Chat]:
        """Change what stands in a history; one that is too short stays as it is."""
        users = chat.at("user")
        at = step.place % len(users)
        match step.kind:
            case "edit":  # a word of an old message is another one
                self._put_word(chat.messages[step.place % len(was.messages)], step.other // 4)
            case "truncate":  # an old tool result, or else a question, loses its end
                results = was.at("tool") or was.at("user")
                message = chat.messages[results[step.place % len(results)]]
                message["content"] = message["content"][:20].rstrip() + " [truncated]"
            case "date":  # dates change where they stand
                self.day = self.day % 30 + 1
                for message in chat.messages:
                    if message["role"] in ("system", "user"):
                        message["content"] = re.sub(
                            r"(Nov |2026-11-)\d\d", rf"\g<1>{self.day:02}", message["content"]
                        )
            case "insert":  # a question stands between two others
                chat.messages.insert(users[at], self.user(1 + step.other % 6))
            case "remove" if (
                len(users) > 1
            ):  # a question goes, alone or with all that was said to it
                at = step.place % (len(users) - 1)
                del chat.messages[users[at] : users[at] + 1 if step.other % 2 else users[at + 1]]
            case "swap" if len(users) > 2:  # two questions with their answers change places
                at = step.place % (len(users) - 2)
                a, b, c = users[at : at + 3]
                chat.messages[a:c] = [*chat.messages[b:c], *chat.messages[a:b]]
            case "tools":  # their list changes
                self._change_tools(chat.tools, step.place % 5 if chat.tools else 0, step.other)
        return [chat]

    def _change_tools(self, tools: list[Body], how: int, number: int) -> None:
        match how:
            case 0 | 1:
                tools.insert(how * len(tools), self.tool())
            case 2:
                tools.pop(number % len(tools))
            case 3:
                tools.reverse()
            case 4:
                tools[number % len(tools)]["function"]["description"] += f" {self.text(1)}"

    def _put_word(self, message: Body, place: int) -> None:
        words = message["content"].split(" ")
        words[place % len(words)] = self.text(1)
        message["content"] = " ".join(words)
