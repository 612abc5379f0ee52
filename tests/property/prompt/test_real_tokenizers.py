"""Prompts on the makers' own tokenizers: as transformers has them, and what was sent is shown."""

import json
import unicodedata
from collections.abc import Callable
from typing import Any, Final

import pytest
from hypothesis import Phase, assume, given, settings, strategies as st

from hearth.proxy.api.chat_completions import parse
from hearth.worker.prompt.prompt_with_sampled_turns import PromptContent
from hearth.worker.sessions.echoed_turn_match import is_trimmed
from tests.helpers.families.family_cases import Case
from tests.helpers.families.real_templates import NEEDS_REAL_TEMPLATES
from tests.helpers.families.real_tokenizers import FAMILIES, PLAIN
from tests.helpers.families.tool_loops import CUTS, LATER, QUESTION, ToolLoop, real_side

pytestmark = NEEDS_REAL_TEMPLATES

NAMES: Final = [names[0] for names in FAMILIES.values()]
TEXTS: Final = (
    *(
        "naïve Zu\u0308rich \u1e9b\u0323 ﬁ",
        "👩‍💻👨‍👩‍👧‍👦 🏳️‍🌈 \u200b\u200d",
        "a\r\nb\r\n\r\n  c\t\nd",
    ),
    *(
        "日本語、한국어 \u0e20\u0e32\u0e29\u0e32 \u0928\u092e\u0938\u094d\u0924\u0947",
        "if a<b:\n\t\treturn  'x' # 12345",
    ),
    "a\u00a0b\u2003c\u3000d\u200a e  f   g" + 40 * " " + "h",
)
CALLED: Final = {"id": "abcdefgh1", "type": "function"}
SCHEMA: Final = {
    "type": "object",
    "properties": {"s": {"type": "string", "description": "The text"}},
    "required": ["s"],
}
TOOL: Final = {
    "type": "function",
    "function": {"name": "save", "description": "Saves a text.", "parameters": SCHEMA},
}


def conversations(text: str) -> list[list[dict[str, Any]]]:
    """Return conversations whose parts are `text`: without and with a call."""
    asked, answer = {"role": "user", "content": text}, {"role": "assistant", "content": text}
    function = {"name": "save", "arguments": {"s": text}}
    call = {"role": "assistant", "content": "", "tool_calls": [CALLED | {"function": function}]}
    result = {"role": "tool", "tool_call_id": CALLED["id"], "content": text}
    talk = [asked, answer, QUESTION]
    return [[asked], talk, [*talk, answer, asked], [QUESTION, call, result]]


@pytest.mark.parametrize("name", NAMES)
def test_a_prompt_has_the_ids_that_transformers_gives(name: str) -> None:
    side = real_side(name)
    for messages in (row for text in TEXTS for row in conversations(text)):
        is_called = "tool_calls" in messages[1] if messages[1:] else False
        if is_called and name in (*PLAIN, *NO_CALLS):
            continue
        tools = [TOOL] if is_called else []
        sent = json.loads(json.dumps(messages))
        for call in (call for row in sent for call in row.get("tool_calls", ())):
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
        prompt = parse({"model": "m", "messages": sent, "tools": tools}).prompt
        content = PromptContent(prompt.messages, prompt.tools, prompt.template_kwargs)
        ours = [side.builder.build(content).ids]
        theirs = side.tokenizer.apply_chat_template(
            messages,
            tools=tools or None,
            add_generation_prompt=True,
            **{"tokenize": True, "return_dict": False, **THINKING},
        )
        ours.append(side.builder.build(content).ids)  # a template may write the date
        assert theirs in ours, (messages, side.text(ours[0]), side.text(theirs))


# Gemma's and DeepSeek V3's templates have no tools, or no calls, of their own.
NO_CALLS: Final = ("gemma3", "deepseek-v3")
THINKING: Final = {"enable_thinking": True, "thinking": True}

SAID: Final = "First.\r\n  Zu\u0308rich 👩‍💻\t\u00a0x  y\n\nEnd"
CITY: Final = " Zu\u0308rich  é 👩‍💻\u00a0x "
CHANGES: Final[dict[str, Callable[[str], str]]] = {
    "composed": lambda text: unicodedata.normalize("NFC", text),
    "decomposed": lambda text: unicodedata.normalize("NFD", text),
    "unix": lambda text: text.replace("\r\n", "\n"),
    "windows": lambda text: text.replace("\r\n", "\n").replace("\n", "\r\n"),
    "joiners lost": lambda text: text.replace("\u200d", ""),
    "trimmed": str.strip,
    "blanks": lambda text: " ".join(text.split()),
}


@st.composite
def changed(draw: Any, text: str) -> str:
    """Return `text` as a client may have it: changed as a whole, or by one character."""
    if draw(st.booleans()):
        return CHANGES[draw(st.sampled_from(sorted(CHANGES)))](text)
    at = draw(st.integers(0, len(text) - 1))
    letter = draw(st.sampled_from(("", " ", "x", "e\u0301", "\u200d", "\t", text[at] * 2)))
    return text[:at] + letter + text[at + 1 :]


@pytest.mark.parametrize("name", NAMES)
@given(data=st.data())
@settings(max_examples=12, phases=[Phase.generate])
def test_what_a_client_changed_in_an_answer_is_shown_as_it_sent_it(
    name: str, data: st.DataObject
) -> None:
    side = real_side(name)
    cases = side.family.cases
    loop = ToolLoop(side, data.draw(st.sampled_from(CUTS)))
    called = cases.get("thinking_call", cases["call"])
    spoken = cases.get("thinking_text", Case("Hello there.", content="Hello there."))
    case = data.draw(st.sampled_from((called, spoken)))
    loop.take(case._replace(text=case.text.replace(spoken.content, SAID).replace("Oslo", CITY)))
    message = loop.messages[1]
    calls = message.get("tool_calls")
    if calls and data.draw(st.booleans()):
        function = calls[0]["function"]
        told = json.loads(function["arguments"])
        was = told["city"]
        told["city"] = now = data.draw(changed(was))
        function["arguments"] = json.dumps(told)
    else:
        where = data.draw(
            st.sampled_from(sorted({"content", "reasoning_content"} & message.keys()))
        )
        was = message[where] or ""
        assume(was)
        message[where] = now = data.draw(changed(was))
        assume(now and not is_trimmed(was, now))  # as clients trim answers of themselves
    assume(now != was)
    loop.messages += [] if calls else [LATER]
    cold = ToolLoop(side)
    cold.messages = loop.messages
    assert loop.ask().ids == cold.ask().ids
