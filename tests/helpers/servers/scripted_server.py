"""Runs all of Hearth for real clients, with a worker whose model's output is scripted."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.fixtures.checkpoint_files import added_token_ids
from scripts.fixtures.fixture_cache import fixture_dir
from tests.helpers.clients.run_clients import CONTEXT_TOKENS, MODEL
from tests.helpers.families.spoken_families import spoken_family
from tests.helpers.servers.server import Server

LAUNCH = """
import sys
from hearth.proxy.main import end, main
end(main([sys.executable, "-m", "tests.helpers.worker_processes.scripted_worker"]))
"""


@dataclass(frozen=True)
class Asked:
    """One request as the worker saw it, and what the model wrote."""

    id: str
    ids: list[int]  # the prompt
    sampled: list[int]  # without the token that ends the turn
    cached: int
    states: list[str]  # how each assistant message was rendered
    session: str
    tools: int

    @property
    def prefilled(self) -> int:
        return len(self.ids) - self.cached


class ScriptedServer(Server):
    """Tiny qwen3 weights behind a family's tokenizer and template, and the script's words."""

    def __init__(
        self, family_name: str = "qwen3", model: Path | str | None = None, **settings: str
    ) -> None:
        """`model` is a whole checkpoint, say one that sees images; it writes as the family does."""
        super().__init__(PROXY_MODEL_ID=MODEL, MAX_KV_SIZE=str(CONTEXT_TOKENS), **settings)
        self.family_name = family_name
        self.directory = self.run_dir / "script"
        self.directory.mkdir()
        self.environment |= {
            "MODEL_PATH": str(model or checkpoint(self.run_dir / "model", family_name)),
            "SCRIPTED_DIR": str(self.directory),
            "SCRIPTED_FAMILY": family_name,
            "DEFAULT_THINKING": "true",  # as the script has it, whatever the family's default
        }

    def start(self, *command: str) -> None:
        super().start(*(command or ("-c", LAUNCH)))

    def pause(self, chunk_s: float) -> None:
        """Have each chunk of a prefill take so much longer from now on, one that waits too."""
        told = self.directory / "pause_s.new"
        told.write_text(str(chunk_s))
        told.replace(self.directory / "pause_s")

    def answer(self, answers: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
        """Have the model answer these texts of users with these turns from now on.

        A turn has what the model thinks in `reasoning`, what it says in `content`, and in `calls`
        pairs of a tool's name and its arguments.
        """
        (self.directory / "answers").write_text(json.dumps(answers))

    def asked(self) -> list[Asked]:
        """Return all requests that the model has answered or is about to."""
        log = self.directory / "requests"
        lines = log.read_text().splitlines() if log.exists() else []
        return [Asked(**json.loads(line)) for line in lines]

    def drawn_at(self) -> float:
        """Return when the model drew its last token, in the seconds of time.time()."""
        return (self.directory / "drawn").stat().st_mtime

    def prompts(self) -> list[str]:
        """Return their prompts as the model was fed them."""
        decode = spoken_family(self.family_name).tokenizer.decode
        return [decode(row.ids) for row in self.asked()]


def checkpoint(directory: Path, family_name: str) -> Path:
    """Make a checkpoint in `directory`: tiny weights behind a family's tokenizer and template."""
    weights, words = fixture_dir("qwen3", tiny=True), spoken_family(family_name)
    directory.mkdir()
    (directory / "model.safetensors").symlink_to(weights / "model.safetensors")
    words.write_tokenizer(directory)
    ids = added_token_ids(directory / "tokenizer.json")
    ends = {"eos_token_id": [ids[end] for end in words.ends]}
    config = json.loads((weights / "config.json").read_text()) | ends
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "generation_config.json").write_text(json.dumps(ends))
    return directory
