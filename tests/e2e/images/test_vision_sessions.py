"""Sessions with screenshots: turns as sampled, losses told, idle work, on real forwards."""

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from hearth.proxy.request.session_id import session_of
from hearth.shared.wire_messages import Prompt
from hearth.worker.stream.answer_parts import AnswerParts, ToolCall
from scripts.harness.agent_worker import Desk, Reply
from scripts.harness.model_families import family
from scripts.harness.vision_worker import picture
from tests.helpers.by_day import by_day

FIXTURES = ("qwen3_5_vl", "qwen3_vl")
LOOK = AnswerParts("I need to see it.", "I look.", (ToolCall("Bash", {"command": "shot"}),))
DONE = AnswerParts("It is all there.", "The button is in the corner.")
SYSTEM = "You drive a desktop. " * 40
NUMBERS = {"first": 2, "second": 6, "third": 3}  # 2 and 6 are of one size


def shown(*parts: str) -> list[dict[str, Any]]:
    """Return content: images by their names, all else words."""
    return [
        {"type": "image", "image": part} if part in NUMBERS else {"type": "text", "text": part}
        for part in parts
    ]


class Conversation:
    """One session that looks at its screen."""

    def __init__(self, fixture: str, log_root: Path, **more: Any) -> None:
        self.desk = Desk(fixture, family("qwen3_5"), log_root, **more)
        self.desk.pictures = {name: picture(fixture, number) for name, number in NUMBERS.items()}
        self.messages: list[dict[str, Any]] = [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": shown("This is my screen:", "first", "Press the button.")},
        ]

    def ask(self, parts: AnswerParts) -> Reply:
        speaker = session_of({}, {"session_id": "s"}, "")
        return self.desk.ask(self.desk.named(Prompt(deepcopy(self.messages)), speaker), parts)

    def take(self, reply: Reply, content: Any) -> None:
        """Take an answer up as a client echoes it, and what follows it."""
        turn: dict[str, Any] = {"role": "assistant", "content": reply.given.content}
        for call, call_id in zip(reply.given.calls, reply.call_ids, strict=True):
            function = {"name": call.name, "arguments": call.arguments}
            turn["tool_calls"] = [{"id": call_id, "type": "function", "function": function}]
        following = {"role": "user", "content": content}
        if reply.call_ids:
            following = {"role": "tool", "tool_call_id": reply.call_ids[0], "content": content}
        self.messages += [turn, following]

    @property
    def encoder_calls(self) -> int:
        vision = self.desk.machine.engine.vision
        assert vision is not None
        return vision.encoder_calls


@pytest.fixture(params=by_day(FIXTURES))
def talk(request: pytest.FixtureRequest, tmp_path: Path) -> Conversation:
    return Conversation(request.param, tmp_path)


def test_a_tool_loop_of_screenshots_reads_each_image_and_each_token_once(
    talk: Conversation,
) -> None:
    first = talk.ask(LOOK)
    assert (talk.encoder_calls, first.cached) == (1, 0)
    talk.take(first, shown("now:", "second"))
    second = talk.ask(DONE)
    known = len(first.ids) + len(first.sampled)
    assert talk.encoder_calls == 2
    assert second.ids[: known - 1] == (first.ids + first.sampled)[: known - 1]
    assert second.cached >= known - 1 and second.divergence is None
    talk.take(second, "Thanks. And now?")
    third = talk.ask(DONE)
    assert talk.encoder_calls == 2, "no image is new"
    assert third.cached >= len(second.ids) and third.divergence is None
    image_tokens = sum(len(talk.desk.pictures[name].ids) for name in ("first", "second"))
    assert third.answer.usage is not None
    assert third.answer.usage.image_tokens == image_tokens
    talk.desk.machine.check()


@pytest.mark.parametrize(
    ("content", "cause", "image"),
    [
        (("This is my screen:", "second", "Press the button."), "image changed", "image 1"),
        (("This is my screen:", "Press the button."), "image removed", "image 1"),
        (("This is my screen:", "first", "third", "Press the button."), "image added", "image 2"),
    ],
)
def test_the_report_names_the_image_that_broke_the_prefix(
    talk: Conversation, content: tuple[str, ...], cause: str, image: str
) -> None:
    first = talk.ask(LOOK)
    talk.take(first, shown("now:", "third"))
    second = talk.ask(DONE)
    talk.take(second, "Thanks. And now?")
    talk.messages[1]["content"] = shown(*content)
    told = talk.ask(DONE).divergence
    assert told is not None
    assert (told["cause"], told["rule"], told["message"], told["role"]) == (cause, image, 1, "user")
    assert told["lost"] > len(second.ids) - 200 - told["token"]


@pytest.mark.parametrize(
    ("end", "instead", "cause"),
    [
        (3, [], "history rewritten"),
        (1, [{"role": "user", "content": "First of all: hurry."}], "message inserted"),
        (5, [{"role": "user", "content": "So far all went well."}], "history rewritten"),
    ],
)
def test_an_image_that_only_moved_with_its_message_is_not_blamed(
    talk: Conversation, end: int, instead: list[dict[str, Any]], cause: str
) -> None:
    for content in (shown("second", "And now?"), "Thanks.", "And then?"):
        talk.take(talk.ask(DONE), content)
    talk.ask(DONE)
    talk.messages[1:end] = instead
    told = talk.ask(DONE).divergence
    assert told is not None and told["cause"] == cause


def test_idle_time_leaves_images_alone_that_it_cannot_read(talk: Conversation) -> None:
    """The file is gone with the request that it came in; what was encoded is read again."""
    first = talk.ask(LOOK)
    talk.take(first, shown("now:", "second"))
    second = talk.ask(DONE)
    vision = talk.desk.machine.engine.vision
    assert vision is not None
    vision.release()
    talk.desk.idle()
    assert talk.encoder_calls == 2
    talk.take(second, "Thanks. And now?")
    assert talk.ask(DONE).cached >= len(second.ids)
    talk.desk.machine.check()
