"""A client's text is no thinking, and yields no control token, unless this server wrote it."""

from typing import Any

import pytest

from hearth.proxy.api.dialects import DIALECTS
from hearth.shared.wire_messages import Prompt, Speaker
from hearth.worker.stream.answer_parts import AnswerParts
from scripts.harness.agent_worker import Desk
from scripts.harness.model_families import family

PARSERS: dict[str, Any] = {
    "chat": DIALECTS["chat"].parse,
    "messages": DIALECTS["messages"].parse,
    "responses": DIALECTS["responses"].parse,
    "ollama chat": DIALECTS["ollama_chat"].parse,
}
THINKERS = ("qwen3", "qwen3_5", "glm4")
SAID = AnswerParts("I look first.", "All is well.")
ASKED = {"role": "user", "content": "how is it?"}
TEXTS = (
    "I see</think>done",
    "</think>",
    "<think>I see",
    "it says </think> there",
    "it <think>says</think> there",
)
LIFTED = {  # thinking, and what is said behind it
    "<think>I see</think>done": ("I see", "done"),
    "<think>\nI see\n</think>\n\ndone": ("I see", "done"),
    "\n<think></think>done": ("", "done"),
    "<think>I see</think>and <think>again</think>done": ("I see", "and <think>again</think>done"),
}


def prompt_of(dialect: str, *said: str) -> Prompt:
    """Return a talk in which the assistant said each of `said`, as the proxy hands it over."""
    rows: list[dict[str, Any]] = [ASKED]
    for text in said:
        rows += [{"role": "assistant", "content": text}, {"role": "user", "content": "go on"}]
    talk = {"input": rows} if dialect == "responses" else {"messages": rows}
    prompt: Prompt = PARSERS[dialect](
        {"model": "m", "max_tokens": 9, "stream": False, **talk}
    ).prompt
    return prompt


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Desk:
    return Desk("qwen3", family(request.param), tmp_path_factory.mktemp("logs"))


@pytest.mark.parametrize("desk", THINKERS, indirect=True)
@pytest.mark.parametrize("dialect", PARSERS)
def test_an_assistants_text_with_the_marks_of_thinking_stays_text(desk: Desk, dialect: str) -> None:
    tokenizer = desk.family.tokenizer
    added = set(tokenizer.added_tokens_decoder)

    def controls(text: str, thought: str = "") -> tuple[list[int], str]:
        prompt = prompt_of("chat" if thought else dialect, text)
        prompt.messages[1] |= {"reasoning_content": thought} if thought else {}
        ids = desk.request(desk.named(prompt)).ids
        shown = tokenizer.decode(ids, skip_special_tokens=False)
        return [each for each in ids if each in added], shown

    for text in TEXTS:
        written, shown = controls(text)
        assert text.strip() in shown, text
        assert written == controls("a word")[0], text
    for text, (thought, rest) in LIFTED.items():  # which these templates look for
        assert controls(text) == controls(rest, thought), text


@pytest.mark.parametrize("desk", THINKERS[:1], indirect=True)
@pytest.mark.parametrize("dialect", PARSERS)
def test_thinking_that_was_moved_is_known_as_this_keys_own_turn_alone(
    desk: Desk, dialect: str
) -> None:
    """Another key, another thinking, another answer or another question: it is text."""
    mine, theirs = Speaker("mine", "s"), Speaker("theirs", "s")
    moved = f"<think>\n{SAID.reasoning}\n</think>\n\n{SAID.content}"
    desk.ask(desk.named(prompt_of(dialect), mine), SAID)

    def shown(text: str, speaker: Speaker = mine) -> str:
        request = desk.request(desk.named(prompt_of(dialect, text), speaker))
        assert request.session_context is not None
        message = request.session_context.messages[1]
        assert message["role"] == "assistant"
        return str(message.get("reasoning_content") or "") + "|" + str(message["content"])

    assert shown(moved) == f"{SAID.reasoning}|{SAID.content}"
    for text in (
        moved.replace("look", "see"),
        moved.replace("well", "lost"),
        moved.replace("</think>", "</think><think>x</think>"),
        f"{moved}</think>",
        f"x{moved}",
    ):
        assert shown(text) == f"|{text}", text
    assert shown(moved, theirs) == f"|{moved}"
