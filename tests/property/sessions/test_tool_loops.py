"""A prompt only ever grows, and a result has its call's id.

Tool loops of every family, on small tokenizers of ours and on the makers' own; and prompts on those
are transformers'.
"""

from collections.abc import Iterator
from typing import Any, Final

import pytest

from hearth.worker.prompt.prompt_with_sampled_turns import PromptContent
from scripts.harness.constrained_answers import tool
from tests.helpers.families.family_cases import family_names
from tests.helpers.families.real_tokenizers import PLAIN, SOURCE_OF, TOLD
from tests.helpers.families.tool_loops import CUTS, QUESTION, LoopDesk, ToolLoop, desk_of
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
        pytest.param(name, is_real, id=f"{name}, {is_real}", marks=pytest.mark.night)
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


@pytest.mark.night
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
