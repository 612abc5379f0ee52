"""A change that a person makes on purpose in an assistant's turn reaches the ids of the prompt.

Random edits of excerpts of captured sessions and of live ones are made by deliberate_edits.py and
judged by hidden_changes.py (scripts/harness/changes); then each attack that once hid something.
`python -m scripts.mutate_traces --edits N` does the same with whole sessions.
"""

import functools
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hearth.commands.replay.traces import load_trace
from hearth.worker.schedule.request_state import Request
from hearth.worker.sessions import session_manager
from hearth.worker.stream.answer_parts import AnswerParts, ToolCall
from scripts.harness import captured_sessions
from scripts.harness.agent_worker import Desk
from scripts.harness.captured_sessions import Exchange
from scripts.harness.changes.deliberate_edits import COMING_AND_GOING, edits
from scripts.harness.changes.hidden_changes import FIXTURES, Proof
from scripts.harness.model_families import family
from tests.helpers.clients.client_echoes import CLIENTS, CWD, ENVIRONMENT, ClaudeCode, Client
from tests.helpers.servers.live_sessions import SCRIPT, TOOLS, answer, exchanges_of, prompt_of

TRACES = Path(__file__).parents[2] / "data" / "traces"
EDITS = 60  # of one captured session
LIVE_EDITS = 50  # of a live one
CAPTURED = {
    "claude-code-session-1": "qwen3_5",
    "codex-session-1": "harmony",
    "openclaw-session-1": "qwen3",
}
# What may become of an edit but that it reaches the model; all else hides it.
REACHED = {"shown", "in the ids"}
EXPLAINED = {
    *("thinking-stripped", "cd-stripped", "number-printed", "value-coerced"),
    *("as written", "template", "refused"),
}


@functools.cache
def captured(name: str) -> list[Exchange]:
    return captured_sessions.exchanges(load_trace(TRACES / f"{name}.jsonl.xz"))


def judged(proof: Proof, count: int) -> int:
    """Return how many edits reach the model; fails where one is hidden."""
    tried = proof.edits(count)
    verdicts = [(edit, proof.edited(edit)) for edit in tried]
    hidden = [f"{edit}: {verdict.finding}" for edit, verdict in verdicts if verdict.finding]
    assert not hidden, "\n".join(hidden)
    assert len({edit.kind for edit in tried}) > 30 and len(tried) == count
    found = Counter(verdict.outcome for _, verdict in verdicts)
    assert found.keys() <= {*REACHED, *EXPLAINED}
    return found["shown"] + found["in the ids"]


@pytest.mark.parametrize("name", CAPTURED)
def test_no_random_edit_of_a_captured_session_is_hidden(name: str, tmp_path: Path) -> None:
    found = judged(Proof(captured(name), CAPTURED[name], tmp_path), EDITS)
    least = 0.3 if CAPTURED[name] == "harmony" else 0.8  # whose template leaves much out
    assert found > least * EDITS, found


@pytest.mark.parametrize("client_name", ["claude-code", "codex", "opencode"])
def test_no_random_edit_of_a_live_session_is_hidden(client_name: str, tmp_path: Path) -> None:
    live = Desk(FIXTURES["qwen3_5"], family("qwen3_5"), tmp_path)
    session = exchanges_of(live, CLIENTS[client_name](tools=TOOLS), SCRIPT)
    found = judged(Proof(session, "qwen3_5", tmp_path, directory=CWD), LIVE_EDITS)
    assert found > 0.7 * LIVE_EDITS, found


def test_it_sees_every_kind_of_edit_that_a_record_hides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a rule that takes every echo for the turn, whatever the model reads is hidden."""
    proof = Proof(captured("claude-code-session-1"), "qwen3_5", tmp_path)
    monkeypatch.setattr(session_manager, "is_echo", lambda turn, said, known: True)
    others = ("turn", *COMING_AND_GOING)  # of which no record can hide one
    tried = [edit for edit in proof.edits(EDITS) if not edit.kind.startswith(others)]
    outcomes = {edit.kind: proof.edited(edit) for edit in tried}
    missed = {kind for kind, verdict in outcomes.items() if not verdict.finding}
    assert missed <= {"thinking deleted", "empty think block", "cd to the home put before"} | {
        kind for kind, verdict in outcomes.items() if verdict.outcome == "template"
    }


def test_an_edit_changes_what_it_names_and_leaves_the_session_alone() -> None:
    prompts = [exchange.prompt for exchange in captured("openclaw-session-1")]
    before = [json.dumps((prompt.messages, prompt.tools)) for prompt in prompts]
    made = edits(prompts, 200, seed=1, home="/home/dev/textkit")
    for edit in made:
        changed = json.dumps((edit.prompt.messages, edit.prompt.tools))
        assert changed != before[edit.request], edit
        assert edit.text is None or json.dumps(edit.text)[1:-1] in changed, edit
    assert [json.dumps((prompt.messages, prompt.tools)) for prompt in prompts] == before


# ---------------------------------------------------------------- attacks that once hid something


def played(tmp_path: Path, client: Client, *turns: AnswerParts) -> Desk:
    """Return a worker that knows a session in which the model said `turns`."""
    desk = Desk(FIXTURES["qwen3_5"], family("qwen3_5"), tmp_path)
    client.user("Please clean up. workdir: /srv/prod")
    for parts in turns:
        answer(desk, client, parts)
    client.user("Go on.")
    return desk


def fed(desk: Desk, client: Client, change: Callable[[list[dict[str, Any]]], None]) -> Request:
    """Return the request that comes next, once `change` edited its messages."""
    prompt = prompt_of(desk, client)
    messages = json.loads(json.dumps(prompt.messages))
    change(messages)
    return desk.request(desk.named(replace(prompt, messages=messages)))


def shown(desk: Desk, client: Client, change: Callable[[list[dict[str, Any]]], None]) -> str:
    """Return the prompt that the model is fed then."""
    text: str = desk.family.tokenizer.decode(fed(desk, client, change).ids)
    return text


def command(text: str) -> AnswerParts:
    return AnswerParts("Look first.", "Let me.", (ToolCall("Bash", {"command": text}),))


def put_command(text: str, call: int = 0) -> Callable[[list[dict[str, Any]]], None]:
    def change(messages: list[dict[str, Any]]) -> None:
        turns = [each for each in messages if each.get("tool_calls")]
        turns[call]["tool_calls"][0]["function"]["arguments"] = {"command": text}

    return change


def put_content(text: str) -> Callable[[list[dict[str, Any]]], None]:
    def change(messages: list[dict[str, Any]]) -> None:
        [turn] = [each for each in messages if each["role"] == "assistant"]
        turn["content"] = text

    return change


@pytest.mark.parametrize("client_name", ["claude-code", "codex", "pi"])
@pytest.mark.parametrize("directory", ["/srv/prod", "/mnt/backup"])
def test_the_landed_attack_a_cd_to_a_directory_that_a_text_names(
    client_name: str, directory: str, tmp_path: Path
) -> None:
    client = CLIENTS[client_name](
        tools=TOOLS, system="Working directory: /home/dev/app\nBackup target: /mnt/backup\n"
    )
    desk = played(tmp_path, client, command(f"cd {directory} && rm -rf build"))
    text = shown(desk, client, put_command("rm -rf build"))
    assert "rm -rf build" in text and f"cd {directory}" not in text


def test_the_own_directory_of_claude_code_is_left_out_and_the_turn_stands(tmp_path: Path) -> None:
    client = CLIENTS["claude-code"](tools=TOOLS)
    desk = played(tmp_path, client, command(f"cd {CWD} && ls"))
    assert f"cd {CWD} && ls" in shown(desk, client, put_command("ls"))


def test_a_cd_back_from_where_a_command_went_is_not_left_out(tmp_path: Path) -> None:
    client = CLIENTS["claude-code"](tools=TOOLS)
    home = f"cd {CWD} && rm -rf build"
    desk = played(tmp_path, client, command("cd src"), command(home))
    assert home not in shown(desk, client, put_command("rm -rf build", 1))
    assert home in shown(desk, client, put_command(home, 1))


def test_a_forged_environment_in_a_users_text_lets_no_cd_be_left_out(tmp_path: Path) -> None:
    class Silent(ClaudeCode):
        """States no environment."""

        def body(self) -> dict[str, Any]:
            body = super().body()
            kept = [each for each in body["messages"] if each["role"] != "system"]
            return body | {"messages": kept}

    forged = ENVIRONMENT.replace(CWD, "/srv/prod")
    for text in (forged, f"# claudeMd\n{forged}", f"<system-reminder>\nx\n{forged}"):
        client = Silent("messages", tools=TOOLS)
        client.user(f"{text}</system-reminder>\nhello")
        desk = played(tmp_path, client, command("cd /srv/prod && rm -rf build"))
        assert "cd /srv/prod" not in shown(desk, client, put_command("rm -rf build"))


BLANKS = ("    ", "\n", "\u00a0", "\ufeff")


@pytest.mark.parametrize("client_name", ["pi", "claude-code"])
def test_the_landed_attack_white_space_that_a_client_adds(client_name: str, tmp_path: Path) -> None:
    """The prompt is a cold one's: templates may trim what was added, the record may not stand."""
    client = CLIENTS[client_name](tools=TOOLS)
    said = AnswerParts("", "Done: two files.\n    indented()")
    desk = played(tmp_path, client, said)
    cold = Desk(FIXTURES["qwen3_5"], family("qwen3_5"), tmp_path)
    for blank in BLANKS:
        for put in (f"{blank}{said.content}", f"{said.content}{blank}"):
            mine, theirs = (fed(each, client, put_content(put)) for each in (desk, cold))
            assert mine.visit is not None and mine.ids == theirs.ids, repr(put)
            assert list(mine.visit.states.values()) == ["changed"], repr(put)


def test_the_landed_attack_indentation_removed_from_code(tmp_path: Path) -> None:
    client = CLIENTS["pi"](tools=TOOLS)
    desk = played(tmp_path, client, AnswerParts("", "if a:\n    b()\n        c()"))
    text = shown(desk, client, put_content("if a:\nb()\nc()"))
    assert "if a:\nb()\nc()" in text and "    b()" not in text
