"""Holds what the faults of a chaos run act on."""

import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from scripts.chaos.clients import Client, Ledger
from scripts.chaos.own_server import OwnServer


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
