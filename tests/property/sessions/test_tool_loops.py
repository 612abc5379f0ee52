"""A prompt only ever grows, a result has its call's id, and what a client changed is shown.

Tool loops of every family, on small tokenizers of ours and on the makers' own; and prompts on those
are transformers'.
"""

import json
import unicodedata
from collections.abc import Iterator
from typing import Any, Final

import pytest
from hypothesis import Phase, assume, given, settings, strategies as st

from hearth.worker.prompt.prompt_with_sampled_turns import PromptContent
from hearth.worker.sessions.echoed_turn_match import is_trimmed
from scripts.harness.constrained_answers import tool
from tests.helpers.families.family_cases import family_names
from tests.helpers.families.real_templates import NEEDS_REAL_TEMPLATES
from tests.helpers.families.real_tokenizers import PLAIN, SOURCE_OF, TOLD
from tests.helpers.families.tool_loops import (
    CUTS,
    LATER,
    QUESTION,
    SPOKEN,
    LoopDesk,
    ToolLoop,
    desk_of,
)
from tests.helpers.worker.prompt_builders import builder_of

NAMES: Final = [row["families"][0] for row in TOLD["tokenizers"].values()]
NO_CALLS: Final = (*PLAIN, "gemma3", "deepseek-v3")  # their templates have none of their own
THINKING: Final = {"enable_thinking": True, "thinking": True}
TEXTS: Final = (
    "naïve Zu\u0308rich \u1e9b\u0323 ﬁ",
    "👩‍💻👨‍👩‍👧‍👦 🏳️‍🌈 \u200b\u200d",
    "a\r\nb\r\n\r\n  c\t\nd",
    "日本語、한국어 \u0e20\u0e32\u0e29\u0e32 \u0928\u092e\u0938\u094d\u0924\u0947",
    "if a<b:\n\t\treturn  'x' # 12345",
    "a\u00a0b\u2003c\u3000d\u200a e  f   g" + 40 * " " + "h",
)
CALLED: Final = {"id": "abcdefgh1", "type": "function"}
SCHEMA: Final = {"type": "string", "description": "The text"}
SAVE: Final = tool("save", {"type": "object", "properties": {"s": SCHEMA}, "required": ["s"]})
SAID: Final = "First.\r\n  Zu\u0308rich 👩‍💻\t\u00a0x  y\n\nEnd"
CITY: Final = " Zu\u0308rich  é 👩‍💻\u00a0x "


def faults(desk: LoopDesk) -> Iterator[str]:
    """Yield what is wrong: each way to cut, half of the time with a client that keeps all."""
    for number, cut in enumerate(CUTS):
        for lead in (ToolLoop.lead, ToolLoop.lead_pairs):
            loop = ToolLoop(desk, cut)
            lead(loop, keeps=(lead is ToolLoop.lead) == bool(number % 2))
            yield from (f"{lead.__name__} {cut}: {fault}" for fault in loop.wrong)


FAMILIES: Final = [
    *(pytest.param(name, False, id=name) for name in family_names(is_real=False)),
    *(
        pytest.param(name, is_real, id=f"{name}, {is_real}", marks=NEEDS_REAL_TEMPLATES)
        for is_real, names in ((False, family_names(is_real=True)), (True, SOURCE_OF))
        for name in names
    ),
]


@pytest.mark.parametrize(("name", "has_real_tokenizer"), FAMILIES)
def test_what_was_sampled_stands_in_a_tool_loop(name: str, has_real_tokenizer: bool) -> None:
    assert not [*faults(desk_of(name, has_real_tokenizer))]


def conversations(text: str) -> list[list[dict[str, Any]]]:
    """Return conversations whose parts are `text`; the last has a call."""
    asked, answer = {"role": "user", "content": text}, {"role": "assistant", "content": text}
    function = {"name": "save", "arguments": {"s": text}}
    call = {"role": "assistant", "content": "", "tool_calls": [CALLED | {"function": function}]}
    result = {"role": "tool", "tool_call_id": CALLED["id"], "content": text}
    talk = [asked, answer, QUESTION]
    return [[asked], talk, [*talk, answer, asked], [QUESTION, call, result]]


@NEEDS_REAL_TEMPLATES
@pytest.mark.parametrize("name", NAMES)
def test_a_prompt_has_the_ids_that_transformers_gives(name: str) -> None:
    family = desk_of(name, is_real=True).family
    builder = builder_of(family)
    for text in TEXTS:
        for messages in conversations(text)[: 3 if name in NO_CALLS else None]:
            tools = [SAVE] if messages[0] is QUESTION else []
            options = {"add_generation_prompt": True, "return_dict": False, **THINKING}
            theirs = family.tokenizer.apply_chat_template(messages, tools=tools or None, **options)
            assert builder.build(PromptContent(messages, tools, THINKING)).ids == theirs, messages


def changed(data: st.DataObject, text: str) -> str:
    """Return `text` as a client may have it: changed as a whole, or by one character."""
    at = data.draw(st.integers(0, len(text) - 1))
    letter = data.draw(st.sampled_from(("", " ", "x", "e\u0301", "\u200d", "\t", text[at] * 2)))
    unix = text.replace("\r\n", "\n")
    whole = (
        *(unicodedata.normalize("NFC", text), unicodedata.normalize("NFD", text)),
        *(unix, unix.replace("\n", "\r\n"), text.replace("\u200d", "")),
        *(text.strip(), " ".join(text.split())),
    )
    one = text[:at] + letter + text[at + 1 :]
    found: str = data.draw(st.sampled_from((one,) * len(whole) + whole))
    return found


@NEEDS_REAL_TEMPLATES
@pytest.mark.parametrize("name", NAMES)
@given(data=st.data())
@settings(max_examples=15, phases=[Phase.generate])
def test_what_a_client_changed_in_an_answer_is_shown_as_it_sent_it(
    name: str, data: st.DataObject
) -> None:
    desk = desk_of(name, is_real=True)
    cases = desk.family.cases
    loop, cold = ToolLoop(desk, data.draw(st.sampled_from(CUTS))), ToolLoop(desk)
    spoken = cases.get("thinking_text", SPOKEN)
    case = data.draw(st.sampled_from((cases.get("thinking_call", cases["call"]), spoken)))
    loop.take(case._replace(text=case.text.replace(spoken.content, SAID).replace("Oslo", CITY)))
    message = loop.messages[1]
    texts = [name for name in ("content", "reasoning_content") if message.get(name)]
    if (bool(texts) and data.draw(st.booleans())) or not case.calls:
        where = data.draw(st.sampled_from(texts))
        was, message[where] = message[where], changed(data, message[where])
        # Clients trim answers of themselves.
        assume(message[where] and not is_trimmed(was, message[where]))
    else:
        function = message["tool_calls"][0]["function"]
        told = json.loads(function["arguments"])
        was, told["city"] = told["city"], changed(data, told["city"])
        function["arguments"] = json.dumps(told)
        assume(told["city"] != was)
    cold.messages = loop.messages = [*loop.messages, *([] if case.calls else [LATER])]
    assert loop.ask().ids == cold.ask().ids
