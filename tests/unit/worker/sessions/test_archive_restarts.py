"""A session goes on after a restart as if nothing had happened: the next prompts are the same.

Two desks talk to the same clients; the sessions of one are thrown away and built anew from their
files before each request.
"""

import functools
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hearth.proxy.request.session_id import session_of
from hearth.shared.wire_messages import Prompt
from hearth.worker.schedule.request_state import Request
from hearth.worker.setup.prompt_and_session_setup import make_sessions, turns_directory
from hearth.worker.stream.answer_parts import AnswerParts, ToolCall
from scripts.harness import agent_worker
from scripts.harness.agent_worker import Desk
from scripts.harness.captured_sessions import PARSE
from scripts.harness.model_families import family
from tests.helpers.clients.client_echoes import CLIENTS, CWD, Client

CHUNK = 256
KINDS = {"qwen3": "qwen3", "harmony": "gpt_oss", "glm4": "qwen3"}
TOOLS = [
    {
        "name": name,
        "description": "Does what its name says.",
        "parameters": {"type": "object", "properties": properties},
    }
    for name, properties in {
        "Bash": {"command": {"type": "string"}},
        "Edit": {"replace_all": {"type": "boolean", "default": False}},
    }.items()
]
SCRIPT = [
    AnswerParts("Look first.", "", (ToolCall("Bash", {"command": f"cd {CWD} && ls -la"}),)),
    AnswerParts("Now change it.", "", (ToolCall("Edit", {"old": "x", "n": 5000.0}),)),
    AnswerParts("All is done.", "Done: two files changed. \u00e4\U0001f600"),
]


@dataclass
class Shop:
    """A desk and its client, restarted before each request or never."""

    desk: Desk
    client: Client
    directory: Path
    restarts: bool

    def restart(self) -> None:
        """Build the sessions anew, from what their files hold."""
        desk = self.desk
        desk.sessions.close()
        ids = desk.sessions.new_id
        desk.sessions = make_sessions(desk.settings, CHUNK, directory=self.directory)
        desk.sessions.new_id = ids
        desk.prompts.sessions = desk.sessions

    def prompt(self) -> Prompt:
        body = self.client.body()
        speaker = session_of(self.client.headers, body, "k")
        return self.desk.named(replace(PARSE[self.client.dialect](body).prompt, speaker=speaker))

    def ask(self, parts: AnswerParts) -> Request:
        """Have the client ask, the model answer, the client take it up and run its tools."""
        if self.restarts:
            self.restart()
        request = self.desk.request(self.prompt())
        self.desk.pretend(request, parts)
        visit = request.session_context
        assert visit is not None and visit.answer is not None
        said = visit.answer
        calls = tuple(ToolCall(name, arguments) for name, arguments in said.calls)
        given = AnswerParts(said.reasoning, said.content, calls)
        self.client.answered(given, tuple(request.deltas.call_ids), request.deltas.signature)
        if calls:
            self.client.results(
                tuple(request.deltas.call_ids), ["result <|im_end|> " + "word " * 30]
            )
        return request


def shops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family_name: str, client_name: str
) -> list[Shop]:
    made = []
    for restarts in (False, True):
        directory = tmp_path / f"{restarts}" / "turns-0"
        make = functools.partial(make_sessions, directory=directory if restarts else None)
        monkeypatch.setattr(agent_worker, "make_sessions", make)
        desk = Desk(KINDS[family_name], family(family_name), tmp_path, CHUNK)
        client = CLIENTS[client_name](strips_thinking=True, tools=TOOLS)
        client.user("Please fix the build.")
        made.append(Shop(desk, client, directory, restarts))
    return made


def told(request: Request) -> dict[str, Any]:
    """Return what a prompt is, and what is known of it."""
    visit = request.session_context
    assert visit is not None
    line = visit.line_match.line
    return {
        "ids": request.ids,
        "states": visit.states,
        "healed": visit.healed,
        "loaded": visit.loaded,
        "shared": visit.shared,
        "divergence": visit.divergence,
        "line": line and (line.number, line.turns),
    }


@pytest.mark.parametrize("client_name", CLIENTS)
@pytest.mark.parametrize("family_name", KINDS)
def test_prompts_after_a_restart_are_those_without_one(
    family_name: str, client_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    living, restarted = shops(tmp_path, monkeypatch, family_name, client_name)
    for number, parts in enumerate(SCRIPT * 3):
        if family_name == "harmony" and parts.calls:
            parts = replace(parts, content="")
        one, other = living.ask(parts), restarted.ask(parts)
        assert told(one) == told(other), number
        assert one.session_context is not None
        assert set(one.session_context.states.values()) <= {"kept"}
        if not parts.calls:
            living.client.user(f"And {number}?")
            restarted.client.user(f"And {number}?")
    assert restarted.desk.sessions.counters()["turns"] == 9
    for shop in (living, restarted):
        shop.desk.sessions.close()


def test_turns_are_apart_by_model_tokenizer_and_template(tmp_path: Path) -> None:
    def directory(name: str, path: str = "model", template: str | None = None) -> Path:
        known = family(name).tokenizer
        tokenizer = SimpleNamespace(
            get_vocab=known.get_vocab,
            added_tokens_decoder=known.added_tokens_decoder,
            chat_template=template or known.chat_template,
        )
        loaded: Any = SimpleNamespace(tokenizer=tokenizer, facts=SimpleNamespace(path=path))
        return turns_directory(tmp_path, loaded)

    made = [directory("qwen3"), directory("glm4"), directory("qwen3", "another model")]
    made.append(directory("qwen3", template="another template"))
    assert len(set(made)) == 4 and directory("qwen3") == made[0]
    assert all(path.parent == tmp_path and path.name.startswith("turns-") for path in made)
