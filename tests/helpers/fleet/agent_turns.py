"""Holds eight successive requests of each agent, as captured, with their long texts cut."""

import json
import lzma
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from hearth.proxy.request.session_id import session_of

TURNS: Final = 8
FILE: Final = Path(__file__).parents[2] / "data" / "agent_turns.jsonl.xz"
_LENGTHS: Final = ("max_tokens", "max_completion_tokens", "max_output_tokens")


@dataclass(frozen=True)
class AgentTurn:
    """One request of an agent, which asks for few tokens."""

    path: str
    headers: Mapping[str, str]
    body: dict[str, Any]

    @property
    def session(self) -> str:
        """Return the session that the agent names, as Hearth reads it."""
        return session_of(self.headers, self.body, "").session


def _turns() -> dict[str, list[AgentTurn]]:
    found: dict[str, list[AgentTurn]] = {}
    for line in lzma.decompress(FILE.read_bytes()).splitlines():
        row = json.loads(line)
        body = {name: value for name, value in row["body"].items() if name not in _LENGTHS}
        body["max_output_tokens" if "input" in body else "max_tokens"] = 16
        if (body.get("thinking") or {}).get("type") == "enabled":
            del body["thinking"]  # its budget is more than 16 tokens
        found.setdefault(row["trace"], []).append(AgentTurn(row["path"], row["headers"], body))
    return found


AGENTS: Final = _turns()
