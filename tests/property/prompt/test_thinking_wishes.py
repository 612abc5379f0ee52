"""A wish about thinking is met by every template that hears it, and prompts only grow."""

from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from hearth.shared.wire_messages import THINKING_LEVELS, ThinkingWish
from hearth.worker.cache.block_hash import pack
from hearth.worker.formats.shared.output_format import OutputFormat
from hearth.worker.prompt.prompt_with_sampled_turns import PromptBuilder, PromptContent
from scripts.harness.model_families import bare_tokenizer
from tests.helpers.families.family_cases import written_family
from tests.helpers.worker.chat_templates import CHATML, tokenizer_with
from tests.helpers.worker.prompt_builders import builder_for

# Whose templates have a switch, levels, both, or a line of the system message.
FAMILIES = ("command_a", "exaone4", "hy4", "k2-horizon", "longcat", "mimo_v2", "nemotron-super-49b")
# Of little effort it writes an empty turn of the model's in front of the answer, as Solar does.
EMPTY_TURN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}<|endoftext|>{{ m.content }}<|im_end|>"
    "{% endfor %}{% if add_generation_prompt %}{% if reasoning_effort == 'low' %}<|im_start|>"
    "assistant<|endoftext|><|im_end|>{% endif %}<|im_start|>assistant{% endif %}"
)
LEVELS = st.none() | st.sampled_from(THINKING_LEVELS)
WISHES = st.builds(ThinkingWish, st.sampled_from((None, True, False)), LEVELS)
ANSWER = "Well done."


@cache
def loaded(name: str) -> tuple[Any, PromptBuilder]:
    tokenizer = written_family(name).tokenizer if name else tokenizer_with(CHATML)
    if not name:
        tokenizer.chat_template = bare_tokenizer(tokenizer).chat_template = EMPTY_TURN
    return tokenizer, builder_for(tokenizer)


def messages(turns: int, has_system: bool) -> list[dict[str, Any]]:
    """Return a talk of so many questions, all but the last one answered."""
    talk = [{"role": "system", "content": "Be brief."}] * has_system
    for at in range(turns):
        talk += [{"role": "user", "content": f"Question {at}"}]
        talk += [{"role": "assistant", "content": ANSWER}] * (at < turns - 1)
    return talk


@pytest.mark.parametrize("name", [*FAMILIES, ""])
@settings(max_examples=12)
@given(wish=WISHES, has_system=st.booleans())
def test_a_wish_that_stays_is_met_and_never_changes_what_stood_there(
    name: str, wish: ThinkingWish, has_system: bool
) -> None:
    tokenizer, builder = loaded(name)
    told = builder.thinking.facts
    turns, before = [], list[int]()
    for count in (1, 2, 3):
        talk = messages(count, has_system)
        known = iter(turns)
        found = [next(known) if each["role"] == "assistant" else None for each in talk]
        built = builder.build(PromptContent(talk, [], {}, found, thinking=wish))
        opening = tokenizer.decode(built.ids[built.header :])
        is_open = OutputFormat(tokenizer).is_thinking_open(opening)
        is_off = wish.on is False or (wish.on is None and told.default == "off")
        assert not (is_off and told.has_switch and is_open)
        assert name == "" or built.ids[: len(before)] == before
        ids = tokenizer.encode(ANSWER, add_special_tokens=False)
        sampled = pack([*built.ids[built.header :], *ids])
        turns.append(SimpleNamespace(ids=sampled, thinking="", prefix=built.prefix))
        before = [*built.ids, *ids]
