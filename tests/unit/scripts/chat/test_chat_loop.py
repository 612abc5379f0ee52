"""The chat of hearth run is checked here without a server: lines, commands, what is sent."""

import os
from pathlib import Path
from typing import Any

import pytest

from hearth.commands.chat.answer_stream import Turn, error_text
from hearth.commands.chat.chat_loop import command_of
from hearth.commands.chat.conversation import Conversation, ImageError, read_image
from hearth.commands.chat.turn_figures import footer, why_lines

PNG = b"\x89PNG\r\n\x1a\n"
USAGE = {
    "prompt_tokens": 1_500,
    "completion_tokens": 101,
    "prompt_tokens_details": {"cached_tokens": 1_400},
    "kv_cache": {"prefilled": 100, "source": "ram", "divergence": None},
    "speculation": {"accepted_prediction_tokens": 30, "rejected_prediction_tokens": 10},
}


def answered(text: str = "Yes.", thinking: str = "", **usage: Any) -> Turn:
    """A whole turn of 101 tokens that took 3 s, the first of them 1 s."""
    turn = Turn(first_s=1.0, total_s=3.0)
    turn.take({"choices": [{"delta": {"content": text, "reasoning_content": thinking}}]})
    turn.take({"choices": [{"delta": {}, "finish_reason": "stop"}], "usage": USAGE | usage})
    return turn


@pytest.mark.parametrize(
    ("line", "command", "rest"),
    [
        ("/why", "/why", ""),
        ("  /image ~/a b.png ", "/image", "~/a b.png"),
        ("/usr/bin/true is what?", "", "/usr/bin/true is what?"),
        ("what is /why?", "", "what is /why?"),
        ("/ is a slash", "", "/ is a slash"),
        ("", "", ""),
    ],
)
def test_a_line_is_a_command_where_its_first_word_is_one(
    line: str, command: str, rest: str
) -> None:
    assert command_of(line) == (command, rest)


def test_a_stopped_answer_is_kept_as_far_as_it_came_and_none_forgets_its_question() -> None:
    talk, turn = Conversation(), Turn()
    talk.question("first", [])
    assert not talk.answered(turn) and talk.messages == []
    turn.take({"choices": [{"delta": {"content": "half an ans"}}]})
    talk.question("second", [])
    assert talk.answered(turn)
    assert [message["content"] for message in talk.messages] == ["second", "half an ans"]


# ---------------------------------------------------------------- images


def test_a_file_that_is_no_image_says_why(tmp_path: Path) -> None:
    path = tmp_path / "x.png"
    path.write_bytes(b"no image")
    with pytest.raises(ImageError, match="is no PNG, JPEG, GIF or WebP"):
        read_image(path)
    with path.open("wb") as file:
        file.truncate(20 * 1024 * 1024 + 1)
    with pytest.raises(ImageError, match="has 20,971,521 bytes; an image has 20,971,520 at most"):
        read_image(path)
    path.write_bytes(b"RIFF1234WEBPVP8 ")
    assert read_image(path).url.startswith("data:image/webp;")
    with pytest.raises(ImageError, match="cannot be read: Is a directory"):
        read_image(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    for endless in (tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(ImageError, match="is no file"):
            read_image(endless)


# ---------------------------------------------------------------- figures


def test_a_turn_says_what_it_cost() -> None:
    assert footer(answered()) == "1,400 tokens kept, 100 read · first after 1.00 s · 50.0 tokens/s"
    assert why_lines(answered(), "chat-1", "http://127.0.0.1:4000") == [
        "prompt   1,500 tokens: 1,400 were kept in memory, 100 were read",
        "answer   101 tokens in 3.00 s, the first after 1.00 s, then 50.0/s",
        "drafts   30 of 40 were right",
        "lost     nothing",
        "more     hearth why chat-1 --base-url http://127.0.0.1:4000",
    ]


@pytest.mark.parametrize(
    ("told", "status", "text"),
    [
        ('{"error": {"message": "Too long."}}', 400, "Too long."),
        ('{"message": "Too long."}', 400, "Too long."),
        ("<html>", 502, "502 <html>"),
        ("[1]", 500, "500 [1]"),
        ('{"error": "odd"}', 500, '500 {"error": "odd"}'),
    ],
)
def test_an_error_is_told_in_its_own_words(told: str, status: int, text: str) -> None:
    assert error_text(told, status) == text
