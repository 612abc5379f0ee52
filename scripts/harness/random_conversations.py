"""Plays random conversations: they grow, are cut back, edited, forked and mixed.

A plan is a value of whole numbers, so that hypothesis, a seed or a person can make one. Each step
changes what a client would send, and sends it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from scripts.harness.chat_client import Asked, Body, Chat, ChatClient, Variant

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
        was = self.chats[step.chat % len(self.chats)]
        does, goes_on = STEPS[step.kind]
        chat = was.fork()
        if goes_on == "always" or (goes_on == "mostly" and step.other % 4):
            self.take(chat, was.last, step.count)
        made = does(self, chat, step, was)
        changed = [chat] if made is None else made
        if not changed:
            return
        is_new = step.kind in NEW
        changed[0].last = None if is_new else was.last
        if self.ask(step.kind, changed):
            at = self.chats.index(was)
            self.chats[at : at + (not is_new)] = changed


# ---------------------------------------------------------------- steps
# A step changes `chat`, a fork of `was`, or returns what else is sent at once; of nothing to change
# it returns nothing to send.

Does = Callable[[ChatClient, Chat, Step, Chat], list[Chat] | None]
GoesOn = Literal["never", "always", "mostly"]  # whether the last answer is taken up before
STEPS: Final[dict[str, tuple[Does, GoesOn]]] = {}
NEW: Final = frozenset(("clear", "fork", "agent", "import", "new"))  # begin beside another one


def _step(goes_on: GoesOn) -> Callable[[Does], Does]:
    def add(does: Does) -> Does:
        STEPS[does.__name__] = does, goes_on
        return does

    return add


@_step("always")
def append(player: ChatClient, chat: Chat, step: Step, was: Chat) -> None:
    """The conversation goes on."""


@_step("always")
def idle(player: ChatClient, chat: Chat, step: Step, was: Chat) -> None:
    """The worker has time before the next request."""
    player.desk.idle()


@_step("always")
def emptied(player: ChatClient, chat: Chat, step: Step, was: Chat) -> None:
    """The cache is emptied before the next request."""
    player.empty()


@_step("always")
def restarted(player: ChatClient, chat: Chat, step: Step, was: Chat) -> None:
    """The worker is restarted before the next request."""
    player.restart()


@_step("always")
def renamed(player: ChatClient, chat: Chat, step: Step, was: Chat) -> None:
    """The client goes on under another session's id."""
    chat.session = chat.session and f"r{len(player.asked)}"


@_step("always")
def left(player: ChatClient, chat: Chat, step: Step, was: Chat) -> None:
    """The client leaves while it is answered, and asks again."""
    player.leave(chat, was.last)


@_step("always")
def twice(player: ChatClient, chat: Chat, step: Step, was: Chat) -> list[Chat]:
    """The client sends one request twice at once."""
    return [chat, chat.fork()]


@_step("never")
def retry(player: ChatClient, chat: Chat, step: Step, was: Chat) -> None:
    """The client sends the last request again."""


@_step("never")
def unanswered(player: ChatClient, chat: Chat, step: Step, was: Chat) -> None:
    """The client leaves the last answer out."""
    chat.messages.append(player.user(step.count))


@_step("never")
def cut(player: ChatClient, chat: Chat, step: Step, was: Chat) -> None:
    """The conversation ends at an earlier question, as it was asked."""
    users = chat.at("user")
    del chat.messages[users[step.place % len(users)] + 1 :]


@_step("never")
def cut_and_ask(player: ChatClient, chat: Chat, step: Step, was: Chat) -> None:
    """Another question stands where an earlier one stood, and is the last."""
    users = chat.at("user")
    place = users[step.place % len(users)]
    chat.messages[place:] = [player.user(step.count)]


@_step("never")
def fork(player: ChatClient, chat: Chat, step: Step, was: Chat) -> None:
    """Another conversation goes on from an earlier answer of this one."""
    ends = [at for at in chat.at("assistant") if "tool_calls" not in chat.messages[at]]
    if ends:
        del chat.messages[ends[step.place % len(ends)] + 1 :]
    chat.messages.append(player.user(step.count))
    chat.session = chat.session if step.other % 2 else chat.session and f"f{len(player.asked)}"


@_step("never")
def agent(player: ChatClient, chat: Chat, step: Step, was: Chat) -> list[Chat]:
    """A sub-agent of the same session begins; its client may say that it is one."""
    system = player.system(4 + step.place % 8)
    tools = chat.tools[: step.place % 3]
    name = f"a{len(player.asked)}" if step.other % 2 and chat.session else ""
    return [Chat(chat.session, [system, player.user(step.count)], tools, name)]


@_step("always")
def parallel(player: ChatClient, chat: Chat, step: Step, was: Chat) -> list[Chat]:
    """The conversation goes on while two forks of it ask something else."""
    forks = [was.fork() for _ in range(2)]
    for each in forks:
        each.messages.append(player.user(step.count))
    return [chat, *forks]


@_step("never")
def clear(player: ChatClient, chat: Chat, step: Step, was: Chat) -> list[Chat]:
    """Another conversation with the same head begins in the same session."""
    return [Chat(chat.session, [*chat.head, player.user(step.count)], chat.tools)]


@_step("always")
def imported(player: ChatClient, chat: Chat, step: Step, was: Chat) -> list[Chat]:
    """Another conversation is sent with a long history; this one goes on."""
    made = player.import_history(bool(chat.session), 2 + step.place % 8)
    made.session = chat.session if step.other % 2 else made.session
    return [chat, made]


@_step("always")
def compact(player: ChatClient, chat: Chat, step: Step, was: Chat) -> None:
    """A summary stands in the place of all but the last questions."""
    users = chat.at("user")
    kept = step.place % 3
    tail = chat.messages[users[-kept] :] if 0 < kept < len(users) else []
    chat.messages = [*chat.head, player.user(step.count + 8), *tail]


@_step("always")
def option(player: ChatClient, chat: Chat, step: Step, was: Chat) -> None:
    """An option of the template changes."""
    chat.options["enable_thinking"] = not chat.options.get("enable_thinking", True)


@_step("always")
def stripped(player: ChatClient, chat: Chat, step: Step, was: Chat) -> None:
    """From now on the client sends no thinking back, neither of earlier answers."""
    chat.echoes_thinking = False
    for message in chat.messages:
        message.pop("reasoning_content", None)


@_step("always")
def stopped(player: ChatClient, chat: Chat, step: Step, was: Chat) -> None:
    """The next answer is cut by a stop string."""
    chat.stops = True


@_step("always")
def rewritten(player: ChatClient, chat: Chat, step: Step, was: Chat) -> None:
    """The client takes the last answer up with another word in it."""
    _put_word(player, chat.messages[len(was.messages)], step.place)


def _put_word(player: ChatClient, message: Body, place: int) -> None:
    words = message["content"].split(" ")
    words[place % len(words)] = player.words.one()
    message["content"] = " ".join(words)


# ---------------------------------------------------------------- what edits a history


@_step("mostly")
def edit(player: ChatClient, chat: Chat, step: Step, was: Chat) -> None:
    """A word of an old message is another one."""
    _put_word(player, chat.messages[step.place % len(was.messages)], step.other // 4)


@_step("mostly")
def truncate(player: ChatClient, chat: Chat, step: Step, was: Chat) -> None:
    """An old tool result, or else a question, loses its end."""
    results = was.at("tool") or was.at("user")
    message = chat.messages[results[step.place % len(results)]]
    message["content"] = message["content"][:20].rstrip() + " [truncated]"


@_step("mostly")
def date(player: ChatClient, chat: Chat, step: Step, was: Chat) -> None:
    """Dates change where they stand."""
    player.day = player.day % 30 + 1
    for message in chat.messages:
        if message["role"] in ("system", "user"):
            message["content"] = player.dated(message["content"])


@_step("mostly")
def insert(player: ChatClient, chat: Chat, step: Step, was: Chat) -> None:
    """A question stands between two others."""
    users = chat.at("user")
    chat.messages.insert(users[step.place % len(users)], player.user(1 + step.other % 6))


@_step("mostly")
def remove(player: ChatClient, chat: Chat, step: Step, was: Chat) -> list[Chat] | None:
    """A question goes, alone or with all that was said to it."""
    users = chat.at("user")
    if len(users) < 2:
        return []
    at = step.place % (len(users) - 1)
    end = users[at] + 1 if step.other % 2 else users[at + 1]
    del chat.messages[users[at] : end]
    return None


@_step("mostly")
def swap(player: ChatClient, chat: Chat, step: Step, was: Chat) -> list[Chat] | None:
    """Two questions with their answers change places."""
    users = chat.at("user")
    if len(users) < 3:
        return []
    at = step.place % (len(users) - 2)
    a, b, c = users[at : at + 3]
    chat.messages[a:c] = [*chat.messages[b:c], *chat.messages[a:b]]
    return None


@_step("mostly")
def tools(player: ChatClient, chat: Chat, step: Step, was: Chat) -> None:
    """The list of tools changes."""
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
