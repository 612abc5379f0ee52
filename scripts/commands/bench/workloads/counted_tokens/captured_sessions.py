"""Plays captured sessions: one agent alone in each of three dialects, live, and with sub-agents."""

from functools import partial
from typing import Final

from hearth.commands.bench.results import HEARTH
from hearth.commands.bench.workload import Measured, Start, Visit, Workload
from hearth.commands.bench.workloads.counted_tokens.counted import play_counted
from hearth.commands.bench.workloads.sessions import session

CHAT: Final = "opencode-session-1"
MESSAGES: Final = "claude-code-session-1"
RESPONSES: Final = "codex-session-1"
FAN_OUT: Final = "opencode-fanout-slow"
FORK: Final = "claude-code-session-9"
LINEAR: Final = "linear"
# Which is to the advantage of that server: what changes in each turn is left out.
AS_CHAT: Final = "A server without that dialect gets it in chat completions, as Hearth reads it."
# The meter takes a forward that verifies drafts for reading: nothing is drafted here. The others
# draft only when they are told to, but for Rapid-MLX on a few models with MTP heads that it knows.
NO_DRAFTS: Final = {"speculate": False}


async def run_alone(name: str, workload: str, visit: Visit) -> Measured:
    """Play one agent's session, turn after turn."""
    visit.kept[workload] = True  # its prompts were read, for who asks them again
    return await play_counted(visit, [session(name, visit, workload)], is_serial=True)


async def run_overlapping(name: str, workload: str, visit: Visit) -> Measured:
    """Play agents that work at once, overlapping as they did when they were captured."""
    return await play_counted(visit, [session(name, visit, workload)])


async def run_live(visit: Visit) -> Measured:
    """Play a session in which the server's own answers are sent back, as a real agent would."""
    return await play_counted(
        visit,
        [session(CHAT, visit, "live")],
        tokens_max=visit.scale.answer_tokens,
        is_live=True,
        is_serial=True,
        extra=NO_DRAFTS if visit.server.name == HEARTH else {},
    )


ALONE: Final = (
    Workload(
        LINEAR,
        "One agent works alone: a tool loop of opencode, chat completions, each turn longer.",
        Start.FRESH,
        partial(run_alone, CHAT, LINEAR),
    ),
    Workload(
        "claude-code",
        "The same by Claude Code, Messages: its tools come later and its marks change. " + AS_CHAT,
        Start.FRESH,
        partial(run_alone, MESSAGES, "claude-code"),
        is_quick=False,
    ),
    Workload(
        "codex",
        "The same by Codex, Responses. " + AS_CHAT,
        Start.FRESH,
        partial(run_alone, RESPONSES, "codex"),
        is_quick=False,
    ),
)
SUB_AGENTS: Final = (
    Workload(
        "sub-agents",
        "An agent of opencode sends two sub-agents at once; they overlap as captured.",
        Start.FRESH,
        partial(run_overlapping, FAN_OUT, "sub-agents"),
    ),
    Workload(
        "forked-agent",
        "Claude Code forks a sub-agent that shares its parent's whole prompt; both go on.",
        Start.FRESH,
        partial(run_overlapping, FORK, "forked-agent"),
        is_quick=False,
    ),
)
LIVE: Final = (
    Workload(
        "live",
        "The session of `linear` again, with the server's own longer answers sent back. What a "
        "server verifies of drafts is counted as read: Hearth drafts nothing here.",
        Start.FRESH,
        run_live,
    ),
)
