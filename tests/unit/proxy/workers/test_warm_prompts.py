"""WARM_PROMPTS over scripted workers: who reads what, when, and what becomes of a bad one."""

import asyncio
import contextlib
import logging
import os
import signal
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from unittest import mock

import orjson
import pytest

from hearth.proxy.http.http_exchange import BODY_BYTES_MAX
from hearth.proxy.request.model_names import ModelNames
from hearth.proxy.request.session_id import key_digest
from hearth.proxy.workers.warm_prompts import WarmPrompts
from hearth.shared.errors import StartError
from hearth.shared.settings_from_env import load_settings
from tests.helpers.proxy.fake_worker_pool import Bench, run, start, stop
from tests.helpers.proxy.proxy_app import app_of

pytestmark = pytest.mark.process

SYSTEM = {"role": "system", "content": "Be brief."}
CHAT = {"messages": [SYSTEM, {"role": "user", "content": "?"}]}
TEXT = {"prompt": "a b c"}


def warmer(directory: Path, *files: Any, **environ: str) -> WarmPrompts:
    """Return what warms with `files`, each given by its content."""
    names = []
    for number, content in enumerate(files):
        path = directory / f"warm{number}.json"
        path.write_bytes(content if isinstance(content, bytes) else orjson.dumps(content))
        names.append(str(path))
    return named_warmer(directory, *names, **environ)


def named_warmer(directory: Path, *names: str, **environ: str) -> WarmPrompts:
    environ = {"WARM_PROMPTS": ",".join(names), "RUN_DIR": str(directory)} | environ
    settings = load_settings({"MAX_KV_SIZE_GB": "0"} | environ, None)
    return WarmPrompts(settings, app_of(directory).local.body_parser, ModelNames.of(settings))


@contextlib.asynccontextmanager
async def warmed(
    *files: Any, count: int = 1, model: str = "pocket", **environ: str
) -> AsyncIterator[Bench]:
    """Run `count` workers that have `model` and are warmed with `files`."""
    with tempfile.TemporaryDirectory(prefix="hearth-") as name:
        made = Bench(Path(name), count, PROXY_MODEL_ID=model)
        made.pool.on_ready = warmer(Path(name), *files, **environ).begin
        await made.supervisor.start()
        try:
            yield made
        finally:
            made.pool.close()
            await stop(made.supervisor)


async def read_by_workers(made: Bench, count: int) -> list[dict[str, Any]]:
    """Return what the workers were asked to read once they have read so many."""
    await made.until(lambda: len(made.events("done")) >= count)
    rows = made.events("Submit")
    assert len(rows) == count
    assert all(row["prefill_only"] and row["pin"] and row["use_kv_cache"] for row in rows)
    return rows


def test_every_worker_reads_every_prompt_at_its_start_and_at_each_restart() -> None:
    async def body() -> None:
        async with warmed([CHAT, TEXT], TEXT | {"prompt": "d"}, count=2) as made:
            rows = await read_by_workers(made, 6)
            ids = {row["request_id"] for row in rows}
            assert len(ids) == 3 and all(name.startswith("warm-") for name in ids)
            first, other = made.supervisor.pids
            for pid in (first, other):
                assert {row["request_id"] for row in rows if row["pid"] == pid} == ids
            os.kill(first, signal.SIGKILL)
            rows = await read_by_workers(made, 9)
            again = [row for row in rows if row["pid"] not in (first, other)]
            assert {row["request_id"] for row in again} == ids, "the pins have their names again"
            await made.until(lambda: not any(link.load for link in made.pool.links.values()))

    run(body)


def test_prompts_are_read_one_after_the_other() -> None:
    async def body() -> None:
        slow = [TEXT | {"prompt": f"prefill=0.1 number {number}"} for number in range(3)]
        async with warmed(slow) as made:
            await read_by_workers(made, 3)
            kinds = [
                json_row["event"]
                for json_row in map(orjson.loads, made.log.read_text().splitlines())
                if json_row["event"] in ("Submit", "done")
            ]
            assert kinds == ["Submit", "done"] * 3

    run(body)


def test_each_key_has_its_own_and_one_key_or_none_is_one() -> None:
    async def body() -> None:
        for environ, keys in (
            ({"PROXY_API_KEYS": "mine, theirs"}, ["mine", "theirs"]),
            ({"PROXY_API_KEY": "mine"}, ["mine"]),
            ({}, [None]),
        ):
            async with warmed(CHAT, **environ) as made:
                rows = await read_by_workers(made, len(keys))
                asked = [row["prompt"]["speaker"]["key"] for row in rows]
                digests = [key_digest({"x-api-key": key} if key else {}) for key in keys]
                assert asked == digests
                assert len({row["request_id"] for row in rows}) == len(keys)

    run(body)


def test_a_prompt_is_for_the_workers_of_its_model_only() -> None:
    async def body() -> None:
        files = [TEXT, TEXT | {"model": "other", "prompt": "d e"}]
        for model, prompt in (("pocket", "a b c"), ("other", "d e")):
            async with warmed(files, model=model, MODELS="other=/x") as made:
                (row,) = await read_by_workers(made, 1)
                assert row["prompt"]["text"] == prompt

    run(body)


def test_what_cannot_be_read_or_pinned_is_one_warning_and_clients_are_served(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)

    async def body() -> None:
        bad = [TEXT | {"prompt": f"refuse=409:pins_full {number}"} for number in range(2)]
        async with warmed([*bad, TEXT]) as made:
            await read_by_workers(made, 3)
            await made.until(lambda: "WARM_PROMPTS" in caplog.text)
            (warning,) = [row for row in caplog.records if row.levelno >= logging.WARNING]
            text = warning.getMessage()
            assert "has not pinned 2 of 3 prompts" in text and "Refused as asked with 409" in text
            answer = await start(made, "n=1")
            answer.close()

    run(body)


def showing(url: str) -> dict[str, Any]:
    part = {"type": "image_url", "image_url": {"url": url}}
    return {"messages": [SYSTEM, {"role": "user", "content": [part]}]}


PIXEL = "data:image/png;base64,iVBORw0KGgo="


def test_a_prompt_with_images_is_read_with_them_and_one_that_is_none_is_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def body() -> None:
        async with warmed([showing("data:image/png;base64,bm9uZQ=="), showing(PIXEL)]) as made:
            (row,) = await read_by_workers(made, 1)
            (part,) = row["prompt"]["messages"][1]["content"]
            assert list(row["images"]) == [part["image"]]
            await made.until(lambda: "has not pinned 1 of 2 prompts" in caplog.text)
            assert "neither PNG" in caplog.text

    run(body)


def test_a_worker_that_goes_while_an_image_is_fetched_is_asked_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def body() -> None:
        async with warmed() as made:
            await made.until(lambda: made.ready_count() == 1)
            directory = made.log.parent
            mine = warmer(directory, showing(PIXEL))
            (link,) = made.pool.links.values()
            fetching, closed = asyncio.Event(), asyncio.Event()

            async def complete(request: Any) -> Any:
                fetching.set()
                await closed.wait()
                return request

            with mock.patch.object(mine.body_parser, "complete", complete):
                mine.begin(link)
                await fetching.wait()
                link.close("It is gone.")
                closed.set()
                (task,) = mine.tasks
                await task
            assert made.events("Submit") == []
            assert "WARM_PROMPTS" not in caplog.text

    run(body)


def test_a_worker_that_dies_amid_it_begins_anew_without_a_warning_of_ours(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def body() -> None:
        async with warmed(TEXT | {"prompt": "prefill=1"}) as made:
            await made.until(lambda: made.events("Submit"))
            os.kill(made.supervisor.pids[0], signal.SIGKILL)
            await made.until(lambda: len(made.events("Submit")) == 2)
            assert "WARM_PROMPTS" not in caplog.text

    run(body)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"{", "unexpected end of data"),
        (b"5", "a JSON object is expected"),
        ([TEXT, "x"], "a JSON object is expected"),
        ({"prompt": 5}, "prompt is 5"),
        ({"messages": "x"}, "messages"),
        ({"prompt": ["a", "b"]}, "one prompt"),
        (TEXT | {"use_kv_cache": False}, "use_kv_cache"),
        (TEXT | {"model": 5}, "model is 5"),
    ],
)
def test_a_bad_file_refuses_to_start_and_is_named(
    content: Any, reason: str, tmp_path: Path
) -> None:
    with pytest.raises(StartError) as caught:
        warmer(tmp_path, TEXT, content)
    text = str(caught.value)
    assert f"WARM_PROMPTS names {tmp_path / 'warm1.json'}, which cannot be read: " in text
    assert reason in text and "Correct the file" in text


def test_a_file_that_is_not_there_or_too_large_refuses_to_start(tmp_path: Path) -> None:
    with pytest.raises(StartError, match="No such file"):
        named_warmer(tmp_path, "no/such/file.json")
    with pytest.raises(StartError, match="Is a directory"):
        named_warmer(tmp_path, str(tmp_path))
    large = tmp_path / "large.json"
    with large.open("wb") as file:
        file.truncate(BODY_BYTES_MAX + 1)
    with pytest.raises(StartError, match=f"{BODY_BYTES_MAX:,} are read at most"):
        named_warmer(tmp_path, str(large))


def test_a_prompt_that_names_an_adapter_is_read_with_it(tmp_path: Path) -> None:
    made = warmer(tmp_path, [CHAT, CHAT | {"model": "law"}], ADAPTERS="law=owner/law-lora")
    assert sorted(request.adapter for request in made._requests.values()) == ["", "law"]
