"""Holds what a setup of an agent is made of: the server, and what launch and connect do with it.

A setup only says what is to be.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

OURS: Final = "hearth"  # the name of our provider in an agent's configuration
KEY_VARIABLE: Final = "HEARTH_KEY"  # the server's key, in an agent's environment
NO_KEY: Final = "local"  # what agents that must send one send to a server that needs none
ANSWER_TOKENS_MAX: Final = 16_384


def answer_tokens(context_tokens: int) -> int:
    """Return how much of a context an agent may plan for one answer."""
    return min(ANSWER_TOKENS_MAX, context_tokens // 4)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The server and the model that an agent is to ask."""

    base_url: str  # without a path
    key: str  # "" = none is needed
    model: str
    context_tokens: int | None  # None = not told
    takes_images: bool = False

    @property
    def v1(self) -> str:
        return f"{self.base_url}/v1"

    @property
    def sent_key(self) -> str:
        return self.key or NO_KEY

    def key_or(self, reference: str) -> str:
        """Return what stands for the key in a file: where it is read, as no file has the key."""
        return reference if self.key else NO_KEY

    @property
    def answer_tokens(self) -> int:
        return answer_tokens(self.context_tokens or 4 * ANSWER_TOKENS_MAX)

    @property
    def inputs(self) -> list[str]:
        return ["text", "image"] if self.takes_images else ["text"]


@dataclass(frozen=True, slots=True)
class Surroundings:
    """Where an agent is set up: its user's home and environment, and a directory of ours."""

    home: Path
    environ: Mapping[str, str]
    directory: Path

    def folder(self, variable: str, default: str) -> Path:
        """Return the folder that `variable` names, else `default` below the home."""
        named = self.environ.get(variable)
        return Path(named).expanduser() if named else self.home / default


@dataclass(frozen=True, slots=True)
class Launch:
    """What an agent is started with, beside its user's own arguments and environment."""

    arguments: tuple[str, ...] = ()  # before the user's
    environment: Mapping[str, str] = field(default_factory=dict)
    removed: tuple[str, ...] = ()  # from the user's environment
    files: Mapping[str, str] = field(default_factory=dict)  # name in the directory -> text
    default_arguments: tuple[str, ...] = ()  # where the user gives none


@dataclass(frozen=True, slots=True)
class ConfigText:
    """What a configuration file of an agent is to say beside what it says."""

    path: Path
    text: str
    remark: str = ""  # what else its user has to see to


@dataclass(frozen=True, slots=True)
class Agent:
    """One agent: how it is called, installed, launched and connected."""

    title: str
    binary: str
    package: str  # of npm
    first_prompt_tokens: int  # measured (docs/clients.md), rounded down
    launch: Callable[[Endpoint, Surroundings], Launch]
    config_texts: Callable[[Endpoint, Surroundings], list[ConfigText]]
    apart: str = ""  # what of its user's own settings `launch` does not keep
    key_variable: str = KEY_VARIABLE  # where it reads the server's key


def json_of(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"
