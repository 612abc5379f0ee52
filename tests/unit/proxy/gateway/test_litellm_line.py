"""Sends large bodies on a line to LiteLLM's process."""

import asyncio
import os
from pathlib import Path

import pytest

from hearth.proxy.gateway.litellm_messages import HELD_BYTES_MAX, read_frame
from hearth.proxy.gateway.litellm_process import LiteLLMLine, LiteLLMUnavailable

pytestmark = pytest.mark.process


def test_a_large_body_goes_a_part_at_a_time_and_holds_nobody_up(tmp_path: Path) -> None:
    async def held_and_told() -> tuple[int, bytes]:
        read = asyncio.Event()

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await read.wait()
            frames.append(await read_frame(reader))
            writer.close()

        frames: list[bytes] = []
        async with await asyncio.start_unix_server(answer, tmp_path / "sock"):
            reader, writer = await asyncio.open_unix_connection(tmp_path / "sock")
            line = LiteLLMLine(reader, writer)
            writing = asyncio.create_task(line.write(body))
            await asyncio.sleep(0.1)
            held = writer.transport.get_write_buffer_size()
            read.set()
            await writing
            with pytest.raises(LiteLLMUnavailable):
                await line.read()
            await line.write(body)  # nobody reads it
            line.close()
        return held, frames[0]

    body = os.urandom(1 << 20) * 8
    held, told = asyncio.run(held_and_told())
    assert told == body
    assert held <= 2 * HELD_BYTES_MAX
