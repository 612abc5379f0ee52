"""Sessions go to and fro between a local model and a cloud that takes back only its own.

The cloud (helpers/servers/mock_cloud.py) verifies signatures, sealed reasoning, ids and pairs as
the real services do; the local model's thinking must never be seen there. The client sends back
the SDK's own objects of what it was given.
"""

import re
from typing import Any, Final

import pytest

from hearth.worker.stream.answer_parts import AnswerParts
from tests.helpers.by_day import by_day
from tests.helpers.clients.sdk_conversations import OSLO, TALKS, WEATHER, dictation, sdks_of
from tests.helpers.cloud.cloud_answers import CloudAnswer, CloudCall
from tests.helpers.cloud.gateway_server import BIG, TwoSidedServer

CALL: Final = CloudCall(OSLO.name, OSLO.arguments)
REST: Final = (AnswerParts("Local thought.", "Local end."),) * 9
SEAL: Final = re.compile(r'"(?:signature|encrypted_content|data)":\s*"([^"]{40,})"')
OPTIONS: Final[dict[str, dict[str, Any]]] = {
    "chat": {},
    "messages": {"thinking": {"type": "enabled", "budget_tokens": 1024}},
    "responses": {"reasoning": {"effort": "medium"}},
    "by id": {"reasoning": {"effort": "medium"}, "store": True},
}


# A turn: who answers, Local or Cloud; thinks, says a word, calls tools.
SESSIONS: Final = (
    "Lts Lts Cts Cts Lts Lts",
    "Cts Lts Cts Lts Lts Cts",
    "Lts1 Cts Cts1 Lts Cts2 Cs",
    "Ct1 Ct2 Lt Cts Lt1 Ct1 Cs",
)
ONE: Final = SESSIONS[2]  # of the day: it has each kind of crossing


def hidden(text: str) -> str:
    """Return a dictation that does not have the model's words itself: they come of it alone."""
    return text.replace("Local ", "\\u004cocal ")


# LiteLLM makes reasoning of Claude whose parts the SDK's types do not know.
@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")
@pytest.mark.parametrize(
    "session",
    [ONE, *(pytest.param(each, marks=pytest.mark.night) for each in SESSIONS if each != ONE)],
)
@pytest.mark.parametrize("model", ["cloud", "claude-cloud"])
@pytest.mark.parametrize("way", by_day(OPTIONS, ("messages", "by id")))
def test_a_session_crosses_and_each_side_knows_all_and_its_own(
    two_sided: TwoSidedServer, way: str, model: str, session: str
) -> None:
    cloud, by_id = two_sided.cloud, way == "by id"
    dialect = "responses" if by_id else way
    own = (dialect, model) in (("messages", "claude-cloud"), ("responses", "cloud"))
    said: list[str] = []
    seals: list[str] = []
    cached = {"L": 0, "C": 0}
    with sdks_of(two_sided) as sdks:
        talk = TALKS[dialect](sdks, **OPTIONS[way])
        results: list[str] = []
        for number, turn in enumerate(session.split(), SESSIONS.index(session)):
            side, thinks = turn[0], "t" in turn
            calls = int(turn[-1]) if turn[-1].isdigit() else 0
            name = "Local" if side == "L" else "Cloud"
            text = f"{name} words {number}." if "s" in turn else ""
            thought = f"{name} thought {number}." if thinks else ""
            for call_id in results:
                talk.result(call_id, f"Rain {number}.")
            if not results:
                parts = AnswerParts(thought, text, (OSLO,) * calls)
                talk.user(hidden(dictation(parts, *REST)))
            elif side == "L":  # amid a turn: it goes on with what was dictated behind it
                text, calls = "", 0
            if side == "C":
                cloud.say(CloudAnswer(text, thought, thought, (CALL,) * calls))
            asked = len(cloud.generations())
            talk.options["model"] = BIG if side == "L" else model
            told = talk.ask(stream=bool(number % 2), tools=(WEATHER,))
            sent = cloud.generations()[asked:]
            assert len(sent) == (side == "C")
            assert told.content.strip() == text or not text
            assert len(told.calls) == calls
            body = sent[0].body.decode() if sent else two_sided.prompts()[-1]
            assert [words for words in said if words not in body] == []
            if sent:
                assert "Local thought" not in body, "thinking of the local model left the machine"
                assert not own or [seal for seal in seals if seal not in body] == []
                seals += SEAL.findall(told.raw.to_json())
            said += [text] if text else []
            cached[side] = told.cached
            results = told.call_ids
            if by_id:
                talk.options["previous_response_id"] = told.raw.id
                talk.history.clear()
                kept = sdks.gpt.responses.retrieve(told.raw.id)
                assert kept.output_text == told.content
    assert cached["L"] > 0, "the local side knows its own turns again"
    assert cached["C"] > 0 or model == "claude-cloud"
    assert not own or bool(seals) == bool(re.search(r"C\w*t", session))
