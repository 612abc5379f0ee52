"""Plays one agent's session, turn after turn, in each of the three dialects that agents speak."""

from collections.abc import Awaitable, Callable
from typing import Final

from hearth.commands.bench.workload import Measured, Scale, Start, Visit, Workload
from hearth.commands.bench.workloads.counted_tokens.counted import play_counted
from hearth.commands.bench.workloads.sessions import session

CHAT: Final = "opencode-session-1"
MESSAGES: Final = "claude-code-session-1"
RESPONSES: Final = "codex-session-1"
# Which is to the advantage of that server: what changes in each turn is left out.
AS_CHAT: Final = "A server without that dialect gets it in chat completions, as Hearth reads it."


def _playing(name: str, workload: str) -> Callable[[Visit], Awaitable[Measured]]:
    async def run(visit: Visit) -> Measured:
        visit.kept[workload] = True  # its prompts were read, for who asks them again
        return await play_counted(visit, [session(name, visit, workload)], is_serial=True)

    return run


def _tokens(quick: int, full: int, whole: int) -> Callable[[Scale], int]:
    return lambda scale: {"quick": quick, "full": full}.get(scale.name, whole)


WORKLOADS: Final = (
    Workload(
        "linear",
        "One agent works alone: a tool loop of opencode, chat completions, each turn longer.",
        Start.FRESH,
        _playing(CHAT, "linear"),
        read_tokens=_tokens(4_300, 8_300, 60_000),
    ),
    Workload(
        "claude-code",
        "The same by Claude Code, Messages: its tools come later and its marks change. " + AS_CHAT,
        Start.FRESH,
        _playing(MESSAGES, "claude-code"),
        is_quick=False,
        read_tokens=_tokens(6_000, 9_800, 93_000),
    ),
    Workload(
        "codex",
        "The same by Codex, Responses. " + AS_CHAT,
        Start.FRESH,
        _playing(RESPONSES, "codex"),
        is_quick=False,
        read_tokens=_tokens(3_900, 7_200, 62_000),
    ),
)
