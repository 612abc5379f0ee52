"""Plays random conversations: they grow, are cut back, edited, forked and mixed.

A plan is a value of whole numbers, so that hypothesis, a seed or a person can make one. Each step
changes what a client would send, and sends it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from scripts.harness.chat_client import Asked, Chat, ChatClient, Variant

NUMBER_MAX: Final = 255  # of the numbers in a plan


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
        chat = self.chats[step.chat % len(self.chats)]
        made = STEPS[step.kind](self, chat.fork(), step, chat)
        if made is None:
            return
        changed = made if isinstance(made, list) else [made]
        for each in changed:
            each.last = chat.last if each is changed[0] and not _is_new(step.kind) else None
        if self.ask(step.kind, changed):
            at = self.chats.index(chat)
            self.chats[at : at + (not _is_new(step.kind))] = changed


# ---------------------------------------------------------------- steps

Made = Chat | list[Chat] | None
Does = Callable[[ChatClient, Chat, Step, Chat], Made]
STEPS: Final[dict[str, Does]] = {}
_NEW: Final = frozenset(("clear", "fork", "agent", "import", "new"))


def _is_new(kind: str) -> bool:
    """Whether the step opens a conversation beside the one that it looks at."""
    return kind in _NEW


def _step(does: Does) -> Does:
    STEPS[does.__name__.strip("_")] = does
    return does


def _count(step: Step) -> int:
    return 2 + step.other % 23


@_step
def append(player: ChatClient, chat: Chat, step: Step, was: Chat) -> Made:
    player.take(chat, was.last, _count(step))
    return chat


@_step
def idle(player: ChatClient, chat: Chat, step: Step, was: Chat) -> Made:
    """The worker has time before the next request."""
    player.desk.idle()
    return append(player, chat, step, was)


@_step
def emptied(player: ChatClient, chat: Chat, step: Step, was: Chat) -> Made:
    """The cache is emptied before the next request."""
    player.empty()
    return append(player, chat, step, was)


@_step
def restarted(player: ChatClient, chat: Chat, step: Step, was: Chat) -> Made:
    """The worker is restarted before the next request."""
    player.restart()
    return append(player, chat, step, was)


@_step
def renamed(player: ChatClient, chat: Chat, step: Step, was: Chat) -> Made:
    """The client goes on under another session's id."""
    player.take(chat, was.last, _count(step))
    chat.session = chat.session and f"r{len(player.asked)}"
    return chat


@_step
def left(player: ChatClient, chat: Chat, step: Step, was: Chat) -> Made:
    """The client leaves while it is answered, and asks again."""
    player.take(chat, was.last, _count(step))
    player.leave(chat, was.last)
    return chat


@_step
def twice(player: ChatClient, chat: Chat, step: Step, was: Chat) -> Made:
    """The client sends one request twice at once."""
    player.take(chat, was.last, _count(step))
    return [chat, chat.fork()]


@_step
def retry(player: ChatClient, chat: Chat, step: Step, was: Chat) -> Made:
    return chat


@_step
def unanswered(player: ChatClient, chat: Chat, step: Step, was: Chat) -> Made:
    """The client leaves the last answer out."""
    chat.messages.append(player.user(_count(step)))
    return chat


@_step
def cut(player: ChatClient, chat: Chat, step: Step, was: Chat) -> Made:
    """The conversation ends at an earlier question, as it was asked."""
    users = chat.at("user")
    del chat.messages[users[step.place % len(users)] + 1 :]
    return chat


@_step
def cut_and_ask(player: ChatClient, chat: Chat, step: Step, was: Chat) -> Made:
    """Another question stands where an earlier one stood, and is the last."""
    users = chat.at("user")
    place = users[step.place % len(users)]
    chat.messages[place:] = [player.user(_count(step))]
    return chat


@_step
def fork(player: ChatClient, chat: Chat, step: Step, was: Chat) -> Made:
    """Another conversation goes on from an earlier answer of this one."""
    ends = [at for at in chat.at("assistant") if "tool_calls" not in chat.messages[at]]
    if ends:
        del chat.messages[ends[step.place % len(ends)] + 1 :]
    chat.messages.append(player.user(_count(step)))
    chat.session = chat.session if step.other % 2 else chat.session and f"f{len(player.asked)}"
    return chat


@_step
def agent(player: ChatClient, chat: Chat, step: Step, was: Chat) -> Made:
    """A sub-agent of the same session begins; its client may say that it is one."""
    system = player.system(4 + step.place % 8)
    tools = chat.tools[: step.place % 3]
    name = f"a{len(player.asked)}" if step.other % 2 and chat.session else ""
    return Chat(chat.session, [system, player.user(_count(step))], tools, name)


@_step
def parallel(player: ChatClient, chat: Chat, step: Step, was: Chat) -> Made:
    """The conversation goes on while two forks of it ask something else."""
    forks = [chat.fork() for _ in range(2)]
    player.take(chat, was.last, _count(step))
    for each in forks:
        each.messages.append(player.user(_count(step)))
    return [chat, *forks]


@_step
def clear(player: ChatClient, chat: Chat, step: Step, was: Chat) -> Made:
    """Another conversation with the same head begins in the same session."""
    head = [chat.messages[0]] if chat.messages[0]["role"] == "system" else []
    return Chat(chat.session, [*head, player.user(_count(step))], chat.tools)


@_step
def imported(player: ChatClient, chat: Chat, step: Step, was: Chat) -> Made:
    """Another conversation is sent with a long history; this one goes on."""
    made = player.import_history(bool(chat.session), 2 + step.place % 8)
    made.session = chat.session if step.other % 2 else made.session
    player.take(chat, was.last, _count(step))
    return [chat, made]


@_step
def compact(player: ChatClient, chat: Chat, step: Step, was: Chat) -> Made:
    """A summary stands in the place of all but the last questions."""
    player.take(chat, was.last, _count(step))
    users = chat.at("user")
    kept = step.place % 3
    tail = chat.messages[users[-kept] :] if 0 < kept < len(users) else []
    head = [chat.messages[0]] if chat.messages[0]["role"] == "system" else []
    chat.messages = [*head, player.user(_count(step) + 8), *tail]
    return chat


@_step
def option(player: ChatClient, chat: Chat, step: Step, was: Chat) -> Made:
    player.take(chat, was.last, _count(step))
    chat.options["enable_thinking"] = not chat.options.get("enable_thinking", True)
    return chat


@_step
def stripped(player: ChatClient, chat: Chat, step: Step, was: Chat) -> Made:
    """From now on the client sends no thinking back, neither of earlier answers."""
    chat.echoes_thinking = False
    for message in chat.messages:
        message.pop("reasoning_content", None)
    player.take(chat, was.last, _count(step))
    return chat


@_step
def stopped(player: ChatClient, chat: Chat, step: Step, was: Chat) -> Made:
    """The next answer is cut by a stop string."""
    player.take(chat, was.last, _count(step))
    chat.stops = True
    return chat


@_step
def rewritten(player: ChatClient, chat: Chat, step: Step, was: Chat) -> Made:
    """The client takes the last answer up with another word in it."""
    at = len(chat.messages)
    player.take(chat, was.last, _count(step))
    words = chat.messages[at]["content"].split(" ")
    words[step.place % len(words)] = player.words.one()
    chat.messages[at]["content"] = " ".join(words)
    return chat


# ---------------------------------------------------------------- what edits a history


def _after(player: ChatClient, chat: Chat, step: Step, was: Chat) -> int:
    """Have the conversation go on in three steps of four; return how many messages it had."""
    count = len(chat.messages)
    if step.other % 4:
        player.take(chat, was.last, _count(step))
    return count


@_step
def edit(player: ChatClient, chat: Chat, step: Step, was: Chat) -> Made:
    """A word of an old message is another one."""
    count = _after(player, chat, step, was)
    message = chat.messages[step.place % count]
    words = message["content"].split(" ")
    words[(step.other // 4) % len(words)] = player.words.one()
    message["content"] = " ".join(words)
    return chat


@_step
def truncate(player: ChatClient, chat: Chat, step: Step, was: Chat) -> Made:
    """An old tool result, or else a question, loses its end."""
    results = chat.at("tool") or chat.at("user")
    message = chat.messages[results[step.place % len(results)]]
    _after(player, chat, step, was)
    message["content"] = message["content"][:20].rstrip() + " [truncated]"
    return chat


@_step
def date(player: ChatClient, chat: Chat, step: Step, was: Chat) -> Made:
    """Dates change where they stand."""
    _after(player, chat, step, was)
    player.day = player.day % 30 + 1
    for message in chat.messages:
        if message["role"] in ("system", "user"):
            message["content"] = player.dated(message["content"])
    return chat


@_step
def insert(player: ChatClient, chat: Chat, step: Step, was: Chat) -> Made:
    _after(player, chat, step, was)
    users = chat.at("user")
    chat.messages.insert(users[step.place % len(users)], player.user(1 + step.other % 6))
    return chat


@_step
def remove(player: ChatClient, chat: Chat, step: Step, was: Chat) -> Made:
    """A question goes, alone or with all that was said to it."""
    _after(player, chat, step, was)
    users = chat.at("user")
    if len(users) < 2:
        return None
    at = step.place % (len(users) - 1)
    end = users[at] + 1 if step.other % 2 else users[at + 1]
    del chat.messages[users[at] : end]
    return chat


@_step
def swap(player: ChatClient, chat: Chat, step: Step, was: Chat) -> Made:
    """Two questions with their answers change places."""
    _after(player, chat, step, was)
    users = chat.at("user")
    if len(users) < 3:
        return None
    at = step.place % (len(users) - 2)
    a, b, c = users[at : at + 3]
    chat.messages[a:c] = [*chat.messages[b:c], *chat.messages[a:b]]
    return chat


@_step
def tools(player: ChatClient, chat: Chat, step: Step, was: Chat) -> Made:
    """The list of tools changes."""
    _after(player, chat, step, was)
    how = step.place % 5
    if how == 0 or not chat.tools:
        chat.tools.insert(0, player.tool())
    elif how == 1:
        chat.tools.append(player.tool())
    elif how == 2:
        chat.tools.pop(step.other % len(chat.tools))
    elif how == 3:
        chat.tools.reverse()
    else:
        function = chat.tools[step.other % len(chat.tools)]["function"]
        function["description"] += f" {player.words.one()}"
    return chat
