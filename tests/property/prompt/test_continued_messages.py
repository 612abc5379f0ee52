"""A last message that is continued: its prompt is transformers', and its text is no control."""

from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st
from mlx_lm.tokenizer_utils import load as load_from_disk

from hearth.shared.errors import RequestError
from hearth.worker.prompt.prompt_with_sampled_turns import PromptBuilder, PromptContent
from scripts.harness.model_families import FAMILIES, bare_tokenizer, family
from tests.helpers.worker.prompt_builders import builder_for

HEADER = "{% for m in messages %}<|im_start|>{{ m.role }}\n"
CLOSED = "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
TEMPLATES = {  # in the manner of a family of its own each; all others are those of the harness
    "trims": HEADER + "{{ m.content | trim }}" + CLOSED,
    "blank in front of the end": HEADER + "{{ m.content.strip() }} " + CLOSED,
    "parts": HEADER + "{% for part in m.content %}{{ part.text }}{% endfor %}" + CLOSED,
    "opens thinking": HEADER + "{% if m.role == 'assistant' %}<think>\n\n</think>\n\n{% endif %}"
    "{{ m.content.split('</think>')[-1].lstrip('\n') }}" + CLOSED + "<think>\n",
    "ends with a word of its own": HEADER
    + "{{ m.content }}{% if m.content.endswith(':') %} (go on){% endif %}"
    + CLOSED,
    "no marks": "{% for m in messages %}{{ m.role | upper }}: {{ m.content }}\n{% endfor %}",
}
UNSHOWN = {
    "the last is left out": "{% for m in messages[:-1] %}{{ m.content }}\n{% endfor %}",
    "written otherwise": HEADER + "{{ m.content | upper }}" + CLOSED,
}
WORDS = (
    *("1, 2,", " ", "\n", "\n\n", "    ", "\t", "\u3000", "z", "🦊", "👩\u200d👩", "é", "日本"),
    *('{"a": ', "```python\n", "<", "think", "</", "|", "assistant", ":"),
)
TEXTS = st.lists(st.sampled_from(WORDS), min_size=1, max_size=5).map("".join)
SHOWN = TEXTS.map(lambda text: f"q{text}")
MARKS = st.sampled_from(("</think>", "<think>", "<tool_call>", "<|im_end|>", "<|im_start|>"))


@cache
def tokenizer_of(name: str) -> Any:
    if name in FAMILIES:
        return family(name).tokenizer
    own = {"chat_template": TEMPLATES.get(name) or UNSHOWN[name]}
    ends = list(family("qwen3").tokenizer.eos_token_ids)
    return load_from_disk(family("qwen3").directory, tokenizer_config_extra=own, eos_token_ids=ends)


@cache
def builder(name: str) -> PromptBuilder:
    return builder_for(tokenizer_of(name), DEFAULT_THINKING="true")


def talk(*contents: str) -> list[dict[str, Any]]:
    return [
        {"role": "assistant" if at % 2 else "user", "content": text}
        for at, text in enumerate(contents)
    ]


def continued(name: str, messages: list[dict[str, Any]]) -> list[int]:
    return builder(name).build(PromptContent(messages, [], {}, continues=True)).ids


@pytest.mark.parametrize("name", [*FAMILIES, *TEMPLATES])
@given(SHOWN, TEXTS, SHOWN, TEXTS.filter(str.strip), st.booleans())
@settings(max_examples=12)
def test_the_prompt_of_a_continued_message_is_that_of_transformers(
    name: str, asked: str, answered: str, again: str, begun: str, is_long: bool
) -> None:
    messages = talk(asked, f"{answered}z", again, begun) if is_long else talk(asked, begun)
    shown: list[dict[str, Any]] = messages
    if name == "parts":
        shown = [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in messages]
    variables = {"enable_thinking": True, "preserve_thinking": True, "thinking": True}
    expected = bare_tokenizer(tokenizer_of(name)).apply_chat_template(
        shown, continue_final_message=True, return_dict=False, **variables
    )
    assert continued(name, messages) == list(expected)


@pytest.mark.parametrize("name", ["qwen3", "qwen3_5", "chatml", *TEMPLATES])
@given(TEXTS, MARKS, TEXTS)
@settings(max_examples=12)
def test_marks_in_a_continued_message_are_text(
    name: str, before: str, mark: str, behind: str
) -> None:
    text = f"z{before}{mark}{behind}z"
    added = set(tokenizer_of(name).get_added_vocab().values())
    ids, plain = continued(name, talk("q", text)), continued(name, talk("q", "z"))
    assert [each for each in ids if each in added] == [each for each in plain if each in added]
    assert tokenizer_of(name).decode(ids).endswith(text)


@pytest.mark.parametrize("name", UNSHOWN)
def test_a_template_that_does_not_show_the_continued_message_is_a_400(name: str) -> None:
    with pytest.raises(RequestError, match="cannot be continued") as caught:
        continued(name, talk("q", "abc"))
    assert caught.value.status == 400
