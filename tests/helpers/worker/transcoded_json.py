"""Puts text through the lenient JSON reader."""

from hearth.worker.stream.tool_calls.lenient_json import Transcoder


def transcoded(text: str, is_complete: bool = True, size: int = 1) -> str:
    transcoder = Transcoder()
    pieces = [transcoder.feed(text[at : at + size]) for at in range(0, len(text), size)]
    return "".join(pieces) + transcoder.finish(is_complete)
