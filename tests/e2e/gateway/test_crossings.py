"""A session goes to and fro between a local model and a cloud that takes back only its own.

The cloud (helpers/servers/mock_cloud.py) verifies signatures, sealed reasoning, ids and pairs as
the real services do; the local model's thinking must never be seen there.
"""

import json
from collections.abc import Iterator
from typing import Any, Final

import pytest

from hearth.worker.stream.answer_parts import AnswerParts, ToolCall
from tests.helpers.clients.sdk_conversations import dictation
from tests.helpers.cloud.cloud_answers import CloudAnswer, CloudCall
from tests.helpers.cloud.crossing_talk import CrossingTalk, Turn
from tests.helpers.cloud.two_sided_server import BIG, TwoSidedServer

TALKS: Final = [
    pytest.param("chat", False, id="chat"),
    pytest.param("messages", False, id="messages"),
    pytest.param("responses", False, id="responses"),
    pytest.param("responses", True, id="responses-by-id"),
]
CLOUDS: Final = {"cloud": "openai/gpt-mock", "claude-cloud": "anthropic/claude-mock"}
in_each_way = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
in_each_dialect = pytest.mark.parametrize(("dialect", "by_id"), TALKS)
before_each_cloud = pytest.mark.parametrize("cloud_model", CLOUDS)


REST: Final = (AnswerParts("Local thought.", "Local end."),) * 3


def hidden(text: str) -> str:
    """Return a dictation that does not have the model's words itself: they come of it alone."""
    return text.replace("Local ", "\\u004cocal ")


class Crossing:
    """A talk whose turns are known on both sides. `number` is of the turn that is asked next."""

    def __init__(self, server: TwoSidedServer, talk: CrossingTalk, cloud_model: str) -> None:
        self.server = server
        self.talk = talk
        self.cloud_model = cloud_model
        self.number = 0

    def local(self, *, stream: bool, call: str = "") -> Turn:
        self.number += 1
        calls = (ToolCall("weather", {"city": call}),) if call else ()
        parts = AnswerParts(f"Local thought {self.number}.", f"Local words {self.number}.", calls)
        turn = self.talk.user(hidden(dictation(parts, *REST))).ask(BIG, stream=stream)
        assert turn.answer.served_by == f"hearth/{BIG}"
        assert turn.text.strip() == f"Local words {self.number}."
        return turn

    def cloud(self, *, stream: bool, call: str = "") -> Turn:
        self.number += 1
        calls = (CloudCall("weather", {"city": call}),) if call else ()
        words, thought = f"Cloud words {self.number}.", f"Cloud thought {self.number}."
        self.server.cloud.say(CloudAnswer(words, thought, calls=calls))
        turn = self.talk.user(f"Question {self.number}.").ask(self.cloud_model, stream=stream)
        assert turn.answer.served_by == CLOUDS[self.cloud_model]
        assert turn.text.strip() == words
        return turn


@pytest.fixture
def crossing(
    two_sided: TwoSidedServer, dialect: str, by_id: bool, cloud_model: str
) -> Iterator[Crossing]:
    yield Crossing(two_sided, CrossingTalk(two_sided.url, dialect, by_id=by_id), cloud_model)
    for request in two_sided.cloud.generations():
        assert b"Local thought" not in request.body, "thinking of the local model left the machine"


@in_each_way
@before_each_cloud
@in_each_dialect
@pytest.mark.parametrize("sides", ["LLCCLL", "CLCLLC"])
def test_six_turns_cross_and_all_that_was_said_is_known_on_both_sides(
    crossing: Crossing, sides: str, stream: bool
) -> None:
    turns = []
    for side in sides:
        turns.append(getattr(crossing, {"L": "local", "C": "cloud"}[side])(stream=stream))
    asked = crossing.server.cloud.generations()
    assert len(asked) == sides.count("C")
    told_there = asked[-1].body.decode()
    told_here = crossing.server.prompts()[-1]
    last = {side: sides.rindex(side) for side in "LC"}
    for number, side in enumerate(sides, 1):
        words = f"{'Local' if side == 'L' else 'Cloud'} words {number}."
        if number <= last["C"]:
            assert words in told_there, number
        if number <= last["L"]:
            assert words in told_here, number
    assert turns[last["L"]].cached > 0, "the local side knows its own turns again"
    assert turns[last["C"]].cached > 0 or crossing.cloud_model == "claude-cloud"


@pytest.mark.parametrize("cloud_model", ["claude-cloud"])
@pytest.mark.parametrize(("dialect", "by_id"), [("messages", False)])
@in_each_way
def test_signed_thinking_of_the_cloud_comes_back_to_it(crossing: Crossing, stream: bool) -> None:
    for side in (crossing.cloud, crossing.local, crossing.cloud):
        side(stream=stream)
    kept = [block for block in blocks_of(crossing) if block["type"] == "thinking"]
    assert [block["thinking"] for block in kept] == ["Cloud thought 1."]


@pytest.mark.parametrize("cloud_model", ["cloud"])
@pytest.mark.parametrize(("dialect", "by_id"), [("responses", False)])
@in_each_way
def test_sealed_reasoning_of_the_cloud_comes_back_to_it(crossing: Crossing, stream: bool) -> None:
    for side in (crossing.cloud, crossing.local, crossing.cloud):
        side(stream=stream)
    items = crossing.server.cloud.requests[-1].json["input"]
    kept = [item for item in items if item.get("type") == "reasoning"]
    assert len(kept) == 1
    memory = crossing.server.cloud.memory
    assert memory.opened(kept[0]["encrypted_content"]) == "Cloud thought 1."


def blocks_of(crossing: Crossing) -> list[dict[str, Any]]:
    rows = crossing.server.cloud.requests[-1].json["messages"]
    found = [row["content"] for row in rows if isinstance(row["content"], list)]
    return [block for content in found for block in content]


@in_each_way
@before_each_cloud
@in_each_dialect
def test_a_call_of_one_side_is_finished_by_the_other(crossing: Crossing, stream: bool) -> None:
    """Amid a turn, with thinking asked for: the hardest place, since signatures are due there."""
    turn = crossing.local(stream=stream, call="Oslo")
    ((call_id, name),) = turn.calls
    assert name == "weather"
    crossing.talk.result(call_id, "Rain in Oslo.")
    crossing.server.cloud.say(CloudAnswer("So it rains.", "Cloud thought."))
    there = crossing.talk.ask(crossing.cloud_model, stream=stream)
    assert there.text == "So it rains."
    assert "Rain in Oslo." in crossing.server.cloud.requests[-1].body.decode()
    turn = crossing.cloud(stream=stream, call="Rome")
    ((call_id, _),) = turn.calls
    here = crossing.talk.result(call_id, "Sun in Rome.").ask(BIG, stream=stream)
    assert here.answer.served_by == f"hearth/{BIG}"
    assert "Sun in Rome." in crossing.server.prompts()[-1]
    assert here.text.strip() == "Local end."


@pytest.mark.parametrize("cloud_model", ["cloud"])
@pytest.mark.parametrize(("dialect", "by_id"), [("responses", True)])
def test_a_stored_response_of_either_side_can_be_read(crossing: Crossing) -> None:
    for side in (crossing.local, crossing.cloud):
        turn = side(stream=False)
        kept = crossing.server.get(f"/v1/responses/{crossing.talk.previous}")
        assert turn.text in json.dumps(kept)
