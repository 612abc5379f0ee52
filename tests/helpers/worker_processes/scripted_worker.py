"""Runs a real worker whose model writes scripted tokens.

Only the sampled tokens are scripted: sockets, prompts, cache, forwards and all that is made of
the tokens are the worker's own. The model is asked for secret words that stand in files, and
finds them with whichever tool the client offers for reading; all else it answers with small talk,
unless it is dictated what to write, or left to write what it likes. What it says to a user's text
may be written down in `answers`: a list of turns, each with what it thinks, says and calls.
In the directory SCRIPTED_DIR it notes each request as a line of `requests`, and in the time of
`drawn` when it drew the last token; it reads from `pause_s`, where that is, how many seconds longer
each chunk of a prefill takes.
"""

import json
import os
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final
from unittest import mock

import mlx.core as mx

from hearth.proxy.request.content_pieces import text_of
from hearth.shared.wire_messages import Prompt
from hearth.worker import main as real
from hearth.worker.engine.decode.sampler import SamplingParams
from hearth.worker.engine.engine import Engine
from hearth.worker.engine.model_loader import LoadedModel
from hearth.worker.schedule.request_state import Request
from hearth.worker.serving_parts import ModelStart
from hearth.worker.setup import rank_setup
from hearth.worker.stream.answer_parts import AnswerParts, ToolCall
from scripts.harness.model_families import Family
from tests.helpers.families.spoken_families import spoken_family

MISSION: Final = "Find the secret words. Begin with "  # a path follows, of start.txt
AGAIN: Final = "Say the secret words once more."
FILES: Final = {  # the words are put in by who writes them
    "start.txt": "The first secret word is {}. Two more stand in left.txt and in right.txt.",
    "left.txt": "The second secret word is {}.",
    "right.txt": "The third secret word is {}.",
}
THOUGHTS: Final = (
    "The first file tells where to look.",
    "Both files are wanted; they can be read at once.",
    "That is all of them.",
)
SMALL_TALK: Final = "A talk about words"
DICTATION: Final = "Write, turn by turn: "  # a list of texts follows, in JSON
FREEDOM: Final = "Write what you like."

# What agents call a tool that can read a file, and its argument: a path, or a command line.
READERS: Final = {
    "Read": ("file_path", "{}"),
    "exec_command": ("cmd", "cat {}"),
    "shell": ("command", "cat {}"),
    "read_file": ("file_path", "{}"),
    "read": ("path", "{}"),
}
_WORDS: Final = re.compile(r"The (first|second|third) secret word is (\w+)\.")
_START: Final = re.compile(re.escape(MISSION) + r"(\S+)/start\.txt")


def answer(prompt: Prompt) -> AnswerParts:
    """Return what the model says: it reads one file, then two at once, then tells the words."""
    asked = [
        number
        for number, message in enumerate(prompt.messages)
        if message["role"] == "user" and (MISSION in _text(message) or AGAIN in _text(message))
    ]
    if not asked or not prompt.tools:
        return AnswerParts(content=SMALL_TALK)
    since = prompt.messages[asked[-1] :]
    words = dict(_WORDS.findall("\n".join(map(_text, prompt.messages))))
    if AGAIN in _text(since[0]):
        return AnswerParts("They were told before.", f"Once more: {_listed(words)}.")
    found = _START.search(_text(since[0]))
    assert found is not None, since[0]
    steps = sum(message["role"] == "assistant" for message in since)
    if steps == 0:
        call = _reading(prompt.tools, f"{found[1]}/start.txt")
        return AnswerParts(THOUGHTS[0], "Let me look into it.", (call,))
    if steps == 1:
        names = ("left.txt", "right.txt")
        calls = tuple(_reading(prompt.tools, f"{found[1]}/{name}") for name in names)
        return AnswerParts(THOUGHTS[1], "", calls)
    return AnswerParts(THOUGHTS[2], f"The words: {_listed(words)}.")


def dictated(prompt: Prompt) -> str | None:
    """Return what the model is told to write in this turn, marks and all; None where nothing."""
    for number, message in reversed(list(enumerate(prompt.messages))):
        if message["role"] == "user" and DICTATION in _text(message):
            text = _text(message).split(DICTATION, 1)[1]
            turns, _ = json.JSONDecoder().raw_decode(text)
            since = prompt.messages[number:]
            return str(turns[sum(message["role"] == "assistant" for message in since)])
    return None


def written_down(prompt: Prompt) -> AnswerParts | None:
    """Return the answer that `answers` has for this turn; None where it has none."""
    file = _directory() / "answers"
    if not file.exists():
        return None
    answers = json.loads(file.read_text())
    for number, message in reversed(list(enumerate(prompt.messages))):
        if message["role"] == "user":
            written = _written(message)  # clients put words of their own around a user's
            turns = next((turns for text, turns in answers.items() if text in written), None)
            since = prompt.messages[number:]
            steps = sum(each["role"] == "assistant" for each in since)
            if turns is None or (turns[0].get("calls") and not prompt.tools):  # say for a title
                return None
            return _parts(turns[min(steps, len(turns) - 1)])
    return None


def _parts(turn: dict[str, Any]) -> AnswerParts:
    calls = tuple(ToolCall(name, arguments) for name, arguments in turn.get("calls", ()))
    return AnswerParts(turn.get("reasoning", ""), turn.get("content", ""), calls)


def _is_free(prompt: Prompt) -> bool:
    return any(
        message["role"] == "user" and FREEDOM in _text(message) for message in prompt.messages
    )


def _text(message: dict[str, Any]) -> str:
    return text_of(message.get("content") or "")


def _written(message: dict[str, Any]) -> str:
    """Return what a user wrote, without what it shows: the last text."""
    content = message["content"]
    parts = [{"text": content}] if isinstance(content, str) else content
    return next((part["text"] for part in reversed(parts) if "text" in part), "").strip()


def _listed(words: dict[str, str]) -> str:
    return ", ".join(words.get(place, f"no {place}") for place in ("first", "second", "third"))


def _reading(tools: Sequence[dict[str, Any]], path: str) -> ToolCall:
    """Return the call that reads a file, with the client's own tool."""
    functions = {tool["function"]["name"]: tool["function"] for tool in tools}
    name = next(name for name in READERS if name in functions)
    argument, form = READERS[name]
    properties = functions[name]["parameters"]["properties"]
    if argument not in properties:
        argument = next(each for each in properties if "path" in each.lower())
    return ToolCall(name, {argument: form.format(path)})


class ScriptedStart(ModelStart):
    """A worker that draws the script's tokens. Owner of what is here: the inference thread."""

    family: Family

    def sampling_params(self, loaded: LoadedModel, request: Request) -> SamplingParams:
        if request.session_context is not None and _is_free(request.session_context.prompt):
            self._note(request, [])
            return super().sampling_params(loaded, request)
        tokens, end = self._script(request)
        said = [*tokens, end]

        def sample(_logprobs: mx.array, places: Sequence[int]) -> mx.array:
            (_directory() / "drawn").touch()
            return mx.array([said[min(place, len(tokens))] for place in places])

        self._note(request, tokens)
        return replace(super().sampling_params(loaded, request), sampler=sample)

    def _script(self, request: Request) -> tuple[list[int], int]:
        """Return the tokens that the model writes, and the one that ends the turn."""
        visit = request.session_context
        parts = AnswerParts(content=SMALL_TALK)
        if visit is not None:
            parts = written_down(visit.prompt) or answer(visit.prompt)
            if visit.prompt.thinking.on is False:
                parts = replace(parts, reasoning="")
        encode = self.family.tokenizer.encode
        text = self.family.written(parts)
        if visit is not None and (told := dictated(visit.prompt)) is not None:
            text = told
        (end,) = encode(self.family.end_of(parts), add_special_tokens=False)
        return encode(text, add_special_tokens=False), end

    def _note(self, request: Request, tokens: list[int]) -> None:
        """Write down what was asked, what of it was kept, and what will be said."""
        visit = request.session_context
        row = {
            "id": request.request_id,
            "ids": request.ids,
            "sampled": tokens,
            "cached": request.cached_tokens,
            "states": list(visit.states.values()) if visit is not None else [],
            "session": visit.prompt.speaker.session if visit is not None else "",
            "tools": len(visit.prompt.tools) if visit is not None else 0,
        }
        with (_directory() / "requests").open("a") as log:
            log.write(json.dumps(row) + "\n")


class SlowEngine(Engine):
    """Takes longer for each chunk of a prefill, as a large model does."""

    def prefill(self, cache: list[Any], ids: list[int], *images: Any) -> None:
        began = time.monotonic()
        while time.monotonic() < began + self._pause_s():
            time.sleep(0.02)
        super().prefill(cache, ids, *images)

    def _pause_s(self) -> float:
        """Return how long a chunk waits, which may have changed while it does."""
        pause = _directory() / "pause_s"
        return float(pause.read_text()) if pause.exists() else 0.0


def _directory() -> Path:
    return Path(os.environ["SCRIPTED_DIR"])


def main() -> int:
    ScriptedStart.family = replace(spoken_family(os.environ["SCRIPTED_FAMILY"]))
    # The model's own tokenizer, in which a family's marks may have other ids.
    vars(ScriptedStart.family)["directory"] = Path(os.environ["MODEL_PATH"])
    with (
        mock.patch.object(real, "ModelStart", ScriptedStart),
        mock.patch.object(rank_setup, "Engine", SlowEngine),
    ):
        return real.main()


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)  # daemon threads that use MLX must not outlive the interpreter
