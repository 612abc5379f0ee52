"""Holds what the faults of a chaos run act on."""

import importlib.util
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

from scripts.chaos.clients import Client, Ledger
from scripts.chaos.own_server import OwnServer

POISONED: Final = "scripts.harness.poisoned_worker"


@dataclass(slots=True)
class Scene:
    """What the faults act on."""

    server: OwnServer
    client: Client
    ledger: Ledger
    rng: random.Random
    flood: int  # requests at once
    slow_s: float  # for which slow readers read nothing


Play = Callable[[Scene], Awaitable[None]]


def can_be_poisoned() -> bool:
    """Tell whether there is what breaks a worker at marked prompts."""
    return importlib.util.find_spec(POISONED) is not None
