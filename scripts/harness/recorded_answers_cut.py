#!/usr/bin/env python
"""Cuts the recorded answers of real models out of clones of two public repositories.

    git clone https://github.com/SWE-agent/SWE-agent && git clone https://github.com/Aider-AI/aider
    python -m scripts.harness.recorded_answers_cut --swe-agent SWE-agent --aider aider

SWE-agent's trajectories hold answers of GPT-4 and of people with the results of their commands;
aider's log of chats holds answers of many models, but not the files that they edited.
"""

import argparse
import json
import lzma
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from scripts.harness.recorded_answers import DATA, digest

SWE_AGENT_COMMIT: Final = "3ea751c087f32b16e039a2233dd6eefecef325d5"
AIDER_COMMIT: Final = "5dc9490bb35f9729ef2c95d00a19ccd30c26339c"
AIDER_LOG: Final = "tests/fixtures/chat-history.md"
AIDER_CHARS_MAX: Final = 700_000  # of the log's 4.1 million, from its start
# A line of the user's or of aider's own, and the answer below it. Output that aider quotes, of
# pytest for one, has neither the two blanks at the line's end nor the empty line.
ANSWERED: Final = re.compile(r"([^\n]*  )\n(\n.{200,})", re.S)
FENCED: Final = re.compile(r"(```.*?```|<command>.*?</command>)", re.S)
EDIT: Final = re.compile(r"\s*(```|<command>)\s*(edit|insert|str_replace)\b")
EDIT_TOOLS: Final = ("edit", "insert", "str_replace", "str_replace_editor")
SEARCH_REPLACE: Final = re.compile(r"(<<<<<<< SEARCH\n.*?>>>>>>> REPLACE)", re.S)
CHAT_BEGIN: Final = re.compile(r"(?m)^(?=# aider chat started at)")
BLOCK_BEGIN: Final = re.compile(r"(?m)^(?=####|> |# aider chat started at)")

Turn = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--swe-agent", type=Path, required=True, help="a clone, bare or not")
    parser.add_argument("--aider", type=Path, required=True, help="a clone, bare or not")
    parser.add_argument("--out", type=Path, default=DATA)
    options = parser.parse_args()
    sets = {
        "swe-agent": list(swe_agent_sessions(options.swe_agent)),
        "aider": list(aider_sessions(git_text(options.aider, AIDER_COMMIT, AIDER_LOG))),
    }
    content = json.dumps(sets, ensure_ascii=False, separators=(",", ":")).encode()
    packing = {"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "dict_size": 1 << 24}
    options.out.write_bytes(lzma.compress(content, filters=[packing]))
    print(f"{options.out}: {options.out.stat().st_size} bytes, digest {digest(options.out)}")


def git_text(repository: Path, commit: str, path: str) -> str:
    return git(repository, "show", f"{commit}:{path}")


def git(repository: Path, *arguments: str) -> str:
    command = ["git", "-C", str(repository), *arguments]
    return subprocess.run(command, capture_output=True, check=True).stdout.decode()


# ---------------------------------------------------------------- SWE-agent


def swe_agent_sessions(repository: Path) -> Iterator[dict[str, Any]]:
    """Yield each trajectory that is not a demonstration within another one."""
    for path in git(repository, "ls-tree", "-r", "--name-only", SWE_AGENT_COMMIT).splitlines():
        if path.endswith(".traj"):
            history = json.loads(git_text(repository, SWE_AGENT_COMMIT, path)).get("history") or []
            yield {"name": path, "turns": swe_agent_turns(history)}


def swe_agent_turns(history: list[dict[str, Any]]) -> list[Turn]:
    """Return the answers of a trajectory, each with what came since the one before it."""
    turns: list[Turn] = []
    said: list[str] = []
    for message in history:
        if message["role"] == "assistant" and not message.get("is_demo"):
            turns.append({"context": said, "answer": swe_agent_parts(message)})
            said = []
        else:
            said.append(text_of(message["content"]))
    return turns


def swe_agent_parts(message: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the thought, the commands and the edits of an answer."""
    text = text_of(message["content"])
    fenced = [(i % 2, part) for i, part in enumerate(FENCED.split(text)) if part]
    parts = [(fenced_kind(part) if is_fenced else "thought", part) for is_fenced, part in fenced]
    for call in message.get("tool_calls") or ():
        function = call["function"]
        kind = "edit" if function["name"] in EDIT_TOOLS else "command"
        parts.append((kind, call_text(function["name"], json.loads(function["arguments"]))))
    return parts


def fenced_kind(text: str) -> str:
    return "edit" if EDIT.match(text) else "command"


def call_text(name: str, arguments: Any) -> str:
    """Return a call as models of the Hermes and Qwen families write it."""
    call = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{call}\n</tool_call>"


def text_of(content: Any) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(part.get("text", "") for part in content or ())


# ---------------------------------------------------------------- aider


def aider_sessions(log: str) -> Iterator[dict[str, Any]]:
    """Yield the chats of aider's log that hold an answer."""
    for chat in CHAT_BEGIN.split(log[:AIDER_CHARS_MAX]):
        turns = aider_turns(chat)
        if turns:
            yield {"name": chat.split("\n", 1)[0].removeprefix("# "), "turns": turns}


def aider_turns(chat: str) -> list[Turn]:
    """Return a chat's answers: what stands below a line of the user's or of aider's own."""
    turns: list[Turn] = []
    said: list[str] = []
    for block in BLOCK_BEGIN.split(chat):
        if found := ANSWERED.fullmatch(block):
            turns.append({"context": [*said, found[1]], "answer": aider_parts(found[2])})
            said = []
        elif block:
            said.append(block)
    return turns


def aider_parts(text: str) -> list[tuple[str, str]]:
    parts = enumerate(SEARCH_REPLACE.split(text))
    return [("edit" if i % 2 else "prose", part) for i, part in parts if part]


if __name__ == "__main__":
    main()
