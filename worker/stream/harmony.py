"""The harmony format of gpt-oss: a turn is a row of messages, each on a channel.

    <|start|>assistant<|channel|>analysis<|message|>...<|end|>
    <|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{}<|call|>

The recipient stands behind the channel or behind the role. The prompt ends with
`<|start|>assistant`, so the first message of a generated text begins with what follows that.
Source: https://cookbook.openai.com/articles/openai-harmony
"""

import re
from dataclasses import dataclass
from typing import Final

CHANNEL: Final = "<|channel|>"
MESSAGE: Final = "<|message|>"
MARKS: Final = frozenset({"<|start|>", CHANNEL, MESSAGE})
ANALYSIS: Final = f"{CHANNEL}analysis{MESSAGE}"  # begins reasoning

_BOUNDARY = re.compile(r"<\|(start|end|call|return)\|>")
_CHANNEL_NAME = re.compile(r"\s*(\w*)")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")


@dataclass(frozen=True, slots=True)
class ChannelMessage:
    """One message of a turn."""

    channel: str  # "analysis" | "commentary" | "final", or what the model wrote; "" = none
    recipient: str  # e.g. "functions.read_file"; "" = the user
    text: str


def channel_messages(text: str) -> list[ChannelMessage]:
    """Return the messages of a generated text in their order, whatever the text.

    Text outside of any message, as of a model that left the format, is one without a channel; a
    header whose message never began is none.
    """
    first, *rest = _BOUNDARY.split(text)
    pieces = [("", first), *zip(rest[::2], rest[1::2], strict=True)]
    found = (_message(piece, is_headed=mark == "start") for mark, piece in pieces)
    return [message for message in found if message is not None]


def _message(piece: str, is_headed: bool) -> ChannelMessage | None:
    """Return the message in the text between two boundaries, None where there is none."""
    header, mark, text = piece.partition(MESSAGE)
    if not mark:
        is_header = is_headed or CHANNEL in piece
        return None if is_header or not piece.strip() else ChannelMessage("", "", piece)
    _, _, behind_channel = header.partition(CHANNEL)
    channel = _CHANNEL_NAME.match(behind_channel)
    recipient = _RECIPIENT.search(header)
    return ChannelMessage(
        channel=channel[1] if channel else "",
        recipient=recipient[1] if recipient else "",
        text=text,
    )
