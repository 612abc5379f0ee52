"""Describes a server that `hearth bench` measures, and how it runs while it is measured."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final, Protocol

from hearth.commands.replay.player import Target

KEY: Final = "bench"
# What Hearth's templates are given unless a request says otherwise, so that prompts are alike.
THINKING: Final = {"chat_template_kwargs": {"enable_thinking": True}}


class Memory(StrEnum):
    """How much a server may keep."""

    DEFAULT = "default"
    NONE = "none"  # its cache is switched off: the answers that a cache must not change
    ONE_SESSION = "one session"  # RAM for the KV of one session, for a day of ten


@dataclass(frozen=True, slots=True)
class Server:
    """How one server is started. `{model}`, `{port}`, `{dir}`, `{memory_mb}` are those of a run."""

    name: str
    command: tuple[str, ...] = ()  # a program beside Hearth's Python or on PATH, and its arguments
    environment: Mapping[str, str] = field(default_factory=dict)
    # More arguments, and more environment, by what it may keep.
    memory_arguments: Mapping[Memory, tuple[str, ...]] = field(default_factory=dict)
    memory_environment: Mapping[Memory, Mapping[str, str]] = field(default_factory=dict)
    memory_extra: Mapping[Memory, Mapping[str, Any]] = field(default_factory=dict)  # for every body
    install: str = ""  # the command by which a user gets it
    packages: tuple[str, ...] = ()  # whose versions a reader must know
    extra: Mapping[str, Any] = field(default_factory=lambda: THINKING)  # for every body
    model: str = ""  # as requests name it; empty = the first that the server lists
    is_chat_only: bool = False
    url: str = ""  # of one that somebody else started: it is neither stopped nor metered
    notes: tuple[str, ...] = ()

    def can_be_told(self, memory: Memory) -> bool:
        """Say whether it has a way to be told what it may keep."""
        if memory is Memory.DEFAULT:
            return True
        told = {*self.memory_arguments, *self.memory_environment, *self.memory_extra}
        return memory in told


@dataclass(frozen=True, slots=True)
class Meter:
    """What attention has computed in all processes of a server since each began."""

    read_tokens: float  # rows of forwards of more than one token, over the attention layers
    forwards: float  # calls, over the attention layers


class Running(Protocol):
    """A server that answers. Workloads stand below the folder that starts it."""

    target: Target
    is_metered: bool
    start_s: float  # from the start of its first process to its first answer

    def meter(self) -> Meter | None:
        """Return the meter, None where the server has none."""

    def pids(self) -> list[int]:
        """Return its processes, those that its processes started too; none by URL."""
