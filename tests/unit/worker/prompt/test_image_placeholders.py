"""Images in prompts: where the message has them, whatever the template does with text."""

import sys
from typing import Any

import pytest

from hearth.shared.errors import RequestError
from hearth.shared.wire_messages import Prompt
from hearth.worker.cache.image_keys import PromptImage, is_inside
from hearth.worker.prompt.prompt_with_sampled_turns import BuiltPrompt, PromptContent
from hearth.worker.prompt.render_messages import without_images
from hearth.worker.prompt.tokenise import ImageForm, marked, pieces_of
from scripts.harness.model_families import FAMILIES, family
from tests.helpers.worker.prompt_builders import (
    ASKED,
    NEXT,
    SYSTEM,
    builder,
    encoded,
    message_of as answer_of,
    parts_of,
)

FIRST = PromptImage(b"1" * 16, (7, 7, 7), (), dict)
SECOND = PromptImage(b"2" * 16, (8, 8), (), dict)
PICTURES = {"one": FIRST, "two": SECOND}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def image(digest: str) -> dict[str, Any]:
    return {"type": "image", "image": digest}


def built(name: str, messages: list[dict[str, Any]]) -> BuiltPrompt:
    return builder(name).build(PromptContent(messages, [], images=PICTURES))


def test_texts_beside_an_image_are_one_with_it_and_others_stay_apart() -> None:
    shown = [text("a"), text("b"), image("one"), image("two"), text("c"), text("d")]
    (message,), digests = marked([{"role": "user", "content": shown}], "*")
    assert message["content"] == [text("a"), text("b**0****1**c"), text("d")]
    assert digests == ["one", "two"]


@pytest.mark.parametrize("name", FAMILIES)
def test_images_stand_where_the_messages_have_them(name: str) -> None:
    call = "" if name in ("gemma3", "chatml", "deepseek", "mistral") else "read"
    result = {"role": "tool", "tool_call_id": "call00000", "name": call}
    messages = [
        SYSTEM,
        {"role": "user", "content": [text("look"), image("one"), text("here"), image("two")]},
        answer_of(parts_of(name, "a call")),
        result | {"content": [text("a shot:"), image("two")]},
        answer_of(parts_of(name)),
        {"role": "user", "content": [image("one"), text("and now")]},
    ]
    one = built(name, messages)
    assert [run.image for run in one.images] == [FIRST, SECOND, SECOND, FIRST]
    for run in one.images:
        assert tuple(one.ids[run.start : run.end]) == run.image.ids
        assert not is_inside(one.keys, run.start) and is_inside(one.keys, run.start + 1)
    first, second, third, fourth = one.images
    tokenizer = family(name).tokenizer
    around = [(0, first.start), (first.end, second.start), (second.end, third.start)]
    words = [tokenizer.decode(one.ids[a:b]) for a, b in [*around, (fourth.end, len(one.ids))]]
    assert words[0].endswith("look") and words[1] == "here"
    assert "a shot:" in words[2] and "and now" in words[3]


@pytest.mark.parametrize("name", FAMILIES)
def test_digits_beside_an_image_are_none_of_its_mark(name: str) -> None:
    spelled = "0" * 50 + " 12" + "0" * 50
    messages = [{"role": "user", "content": [text(spelled), image("one"), text(spelled)]}]
    one = built(name, messages)
    (run,) = one.images
    ids = encoded(name, spelled)
    assert one.ids[run.end : run.end + len(ids) - 1] == ids[:-1]


def test_what_a_processor_writes_around_an_image_is_joined_to_the_text_beside_it() -> None:
    tokeniser = builder("gemma3").tokeniser
    mark = tokeniser.mark
    (message,), digests = marked([{"content": [text("word\n"), image("one"), text("x")]}], mark)
    form = ImageForm(before="\n\n", after="\n\n")
    pieces = pieces_of(tokeniser, message["content"], [FIRST], form)
    assert digests == ["one"]
    assert [piece.text for piece in pieces if piece.image is None] == ["word\n\n\n", "\n\nx"]
    first, shown, last = pieces
    assert shown.image is FIRST and not shown.is_added
    assert list(first.ids) == encoded("gemma3", "word\n\n\n")
    assert list(last.ids) == encoded("gemma3", "\n\nx")


def test_an_image_that_the_template_leaves_out_is_told() -> None:
    tokeniser = builder("qwen3").tokeniser
    mark = 2 * tokeniser.mark
    with pytest.raises(RequestError, match="leaves out 1 of the 2 images"):
        pieces_of(tokeniser, f"{mark}1{mark}", [FIRST, SECOND], ImageForm())


def test_an_image_that_was_not_sent_is_told() -> None:
    with pytest.raises(RequestError, match="was not sent"):
        built("qwen3", [{"role": "user", "content": [image("three")]}])


def test_a_prompt_of_text_is_what_it_was_before_there_were_images() -> None:
    one = built("qwen3", [SYSTEM, ASKED, answer_of(parts_of("qwen3")), NEXT])
    assert not one.images and one.keys.tolist() == one.ids


def test_a_text_model_refuses_images_of_users_and_is_told_of_those_in_results() -> None:
    shot = [text("here:"), image("one")]
    result = Prompt([ASKED, {"role": "tool", "content": shot}])
    told = without_images(result, "local")
    assert told[0] is ASKED
    assert told[1]["content"][1] == text("[image omitted: this model reads text only]")
    question = Prompt([ASKED, {"role": "user", "content": shot}], places={"one": "input[0].image"})
    with pytest.raises(RequestError, match=r"input\[0\].image is an image, and local") as error:
        without_images(question, "local")
    assert error.value.code == "unsupported_content"
    assert str(error.value).endswith("Remove the image, or serve a vision model (MODEL_PATH).")


def test_without_the_extra_an_images_refusal_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mlx_vlm", None)
    with pytest.raises(RequestError, match=r"install the extra 'vision' .*'\.\[vision\]'") as error:
        without_images(Prompt([{"role": "user", "content": [image("one")]}]), "local")
    assert (error.value.status, error.value.code) == (400, "unsupported_content")
    assert str(error.value).endswith("and serve a vision model (MODEL_PATH).")
