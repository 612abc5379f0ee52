"""No memory of a worker serves one API key's client with what another's has said.

Real prompts, sessions, cache and model, on one machine; only what the model says is scripted. Each
memory tells who finds what whose request has left there.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from hearth.shared.wire_messages import Constraints, Prompt, Sampling, Speaker, Submit
from hearth.worker.draft import answer_drafter
from hearth.worker.schedule.request_state import ClientLease
from hearth.worker.stream.answer_parts import AnswerParts, ToolCall
from scripts.harness.agent_worker import Desk
from scripts.harness.model_families import family
from scripts.harness.socketless_worker import Answer
from tests.helpers.memory_spies import Spies, cached_functions

MINE, THEIRS = "mine", "theirs"
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}]
SAID = AnswerParts("The code is asked for.", "", (ToolCall("weather", {"city": "swordfish"}),))
QUESTION: list[dict[str, Any]] = [
    {"role": "system", "content": "Working directory: /home/me/plans\nToday's date: 2026-11-23"},
    {"role": "user", "content": "The code is swordfish 7731. " * 20},
]

# What is looked up there says nothing: these are gone through to make room, whosever they are, and
# by objects and numbers that only who found them by `ExtentStore._nodes` or a slot's root has.
OF_ROOM = {"ExtentStore._extents", "KVManager._slots"}
# Cached functions, and what decides their result: nobody's words.
CACHED = {
    "shared.listen_addresses.listen_addresses": "the name in PROXY_HOST",
    "worker.kv.quantise_kv._sample": "numbers of bits and rows",
    "worker.kv.quantise_kv._unpacker": "a number of bits",
}
SERVING = {  # the memories that spare a client the cost of what it has said before
    "ConversationLines._lines",
    "DraftLength",
    "DraftMemory._answers",
    "ExtentStore._nodes",
    "MemoryByOwner._values",
    "ThinkingStore._thinking",
    "TokenHistory",
    "TurnStore._listed",
}
# What drafts are made of and how long they are: who writes to one of these, and who reads it.
DRAFTING = (
    (answer_drafter, "TokenHistory", ("__init__", "extend"), ("find", "followed")),
    (answer_drafter, "DraftLength", ("record",), ("count", "is_worth")),
)


def goes_on(call_id: str) -> list[dict[str, Any]]:
    """Return the question, the answer as a client echoes it that drops thinking, and a result."""
    call = {"name": "weather", "arguments": {"city": "swordfish"}}
    echo = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": call_id, "type": "function", "function": call}],
    }
    return [
        *QUESTION,
        echo,
        {"role": "tool", "tool_call_id": call_id, "content": "The word is eggs."},
    ]


class Talk:
    """Two keys' clients of one worker, who may say the same."""

    def __init__(self, log_root: Path) -> None:
        self.desk = Desk("qwen3", family("qwen3"), log_root)
        machine = self.desk.machine
        parts = (self.desk.builder, machine.scheduler, machine.keeper, machine.engine)
        self.spies = Spies(*parts, self.desk.sessions)
        self.compiler = self.desk.facts.grammar_compiler
        self._number = 0
        self.call_id = ""  # that the first one was given

    def say(self, key: str, messages: Sequence[dict[str, Any]], **more: Any) -> Answer:
        self.spies.who = key
        self._number += 1
        prompt = self.desk.named(Prompt([*messages], TOOLS), Speaker(key, "session"))
        lease = ClientLease(f"r{self._number}", b"peer")
        lease.lease_until = float("inf")
        message = Submit(lease.request_id, prompt, Sampling(max_tokens=64), **more)
        request = self.desk.builder.build(lease, message)
        end = self.desk.family.end_of(SAID)
        script = self.desk.family.tokenizer.encode(end, add_special_tokens=False)
        machine = self.desk.machine
        machine.scripts[request.request_id] = [*self.desk.script(request, SAID), *script]
        answer = machine.enter(request)
        machine.run()
        self.desk.idle()
        return answer

    def talk(self, key: str) -> list[int]:
        """Ask, and go on; return how many tokens were kept of each prompt.

        Whoever it is goes on with the first one's id of the call, and then with an unknown one.
        """
        rows = [self.say(key, QUESTION)]
        self.call_id = self.call_id or rows[0].request.deltas.call_ids[0]
        rows += [self.say(key, goes_on(call_id)) for call_id in (self.call_id, "unknown")]
        self.say(key, QUESTION, constraints=Constraints(tool_choice="required"))
        return [row.cached for row in rows]


@pytest.fixture(scope="module")
def talked(tmp_path_factory: pytest.TempPathFactory) -> tuple[Talk, list[list[int]]]:
    """Return a talk of A's, B's that says the same, and A's again; and what was kept of each."""
    talk = Talk(tmp_path_factory.mktemp("logs"))
    with pytest.MonkeyPatch.context() as patch:
        for module, name, writes, reads in DRAFTING:
            patch.setattr(module, name, talk.spies.watching(getattr(module, name), writes, reads))
        return talk, [talk.talk(key) for key in (MINE, THEIRS, MINE)]


def test_a_probe_finds_nothing_in_any_memory_of_what_another_key_has_said(
    talked: tuple[Talk, list[list[int]]],
) -> None:
    talk, cached = talked
    crossed = {row: count for row, count in talk.spies.crossed().items() if row[0] not in OF_ROOM}
    assert crossed == {}
    assert cached[1] == cached[0], "the probe costs what the first one to say it paid"


def test_each_memory_serves_the_one_who_has_said_it(talked: tuple[Talk, list[list[int]]]) -> None:
    talk, cached = talked
    assert talk.spies.own(MINE) >= SERVING
    assert min(cached[2]) > max(cached[0][0], 100)


def test_no_function_remembers_results_by_what_a_client_says(
    talked: tuple[Talk, list[list[int]]],
) -> None:
    assert cached_functions() <= CACHED.keys()


def test_what_is_drafted_from_outlives_no_answer_but_in_the_memory_of_its_key(
    talked: tuple[Talk, list[list[int]]],
) -> None:
    talk, _ = talked
    memory = talk.desk.machine.drafts._memory
    owners = {answer.request.api_key for answer in talk.desk.machine.answers.values()}
    assert len(owners) == 2 and memory._answers.keys() == owners
    assert memory._lengths._values.keys() == owners


def test_what_calls_are_drafted_by_is_kept_for_each_key(
    talked: tuple[Talk, list[list[int]]],
) -> None:
    talk, _ = talked
    owners_of: dict[str, set[str]] = {}
    for owner, sources in talk.compiler._compiled._values.items():
        for source in sources:
            owners_of.setdefault(source, set()).add(owner)
    texts = talk.compiler._draft_texts._values
    assert [len(owners) for owners in owners_of.values()] == [2], "that of a call that is asked for"
    assert all(texts.keys() == owners for owners in owners_of.values())


def test_a_prediction_leaves_nothing_in_any_memory(tmp_path: Path) -> None:
    talk = Talk(tmp_path)
    talk.say(MINE, QUESTION)
    tokeniser = talk.desk.builder._prompts.builder.tokeniser
    before = tokeniser.memory.cost
    talk.say(MINE, QUESTION, prediction="The word is eggs. " * 1_000)
    assert tokeniser.memory.cost < before + 1_000
