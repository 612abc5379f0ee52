"""Measures what a session's next turn reads once the worker that held it was killed.

One captured session is played on two workers, its requests one after another. Between two of them
the worker that answered the last one gets SIGKILL. What the session then reads is held to what a
cache that lost nothing would read, and to the whole prompt, which is read where nothing is shared.
"""

import os
import signal
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

from hearth.commands.replay.player import Row, replay
from hearth.commands.replay.traces import Captured
from scripts.bench.routing.rules import TODAY
from scripts.bench.routing.served import QUICK_DISK, Served, model_dir, served
from scripts.replay.__main__ import excesses

WORKERS: Final = 2
MODELS: Final = ("qwen3", "qwen3_5", "gpt_oss")  # dense, hybrid, window
SESSION: Final = "claude-code-session-1"
KILLS: Final = (4, 8, 12)  # requests of the session that are sent before the kill


async def killed_lines(
    captured: Sequence[Sequence[Captured]], tokens_max: int, models: Sequence[str] = MODELS
) -> list[dict[str, Any]]:
    """Return, for each model and moment, what the next turn reads."""
    session = next((rows for rows in captured if rows[0].trace == SESSION), captured[0])
    lines = []
    for model in models:
        for after, has_disk in [*((after, True) for after in KILLS), (KILLS[-1], False)]:
            settings = {} if has_disk else {"MAX_KV_SIZE_GB": "0"}
            async with served(
                model_dir(model), WORKERS, settings, TODAY, tokens_max, QUICK_DISK
            ) as server:
                line = await _killed(server, session[: after + 1])
            lines.append({"model": model, "has_disk": has_disk, "after": after, **line})
            print(line_text(lines[-1]), flush=True)
    return lines


async def _killed(server: Served, session: Sequence[Captured]) -> dict[str, Any]:
    """Play all but the last request, kill their worker, and return what the last one reads."""
    target = replace(server.target, is_serial=True)
    before, _ = await replay(session[:-1], target)
    last = before[-1].outcome.request_id
    held_by = (await server.all_finished({last}))[last]
    pids = {row["id"]: row["pid"] for row in (await server.health())["workers"]}
    os.kill(pids[held_by], signal.SIGKILL)
    after, _ = await replay(session[-1:], target)
    rows: list[Row] = [*before, *after]
    tokens = after[-1].tokens
    assert tokens is not None, after[-1].outcome.error
    taken = after[-1].outcome.request_id
    took = (await server.all_finished({taken}))[taken]
    return {
        "prompt": tokens.prompt,
        "prefilled": tokens.prefilled,
        "excess": excesses(rows)[-1],
        "source": tokens.source,
        "moved": took != held_by,
        "ttft_s": after[-1].outcome.ttft_s,
    }


# ---------------------------------------------------------------- reporting


def line_text(line: dict[str, Any]) -> str:
    files = "shared files" if line["has_disk"] else "no files"
    return (
        f"{line['model']}, {files}, killed after request {line['after']}: read "
        f"{line['prefilled']:,} of {line['prompt']:,}, {line['excess']:,} more than needed"
    )


def killed_table(lines: Sequence[dict[str, Any]]) -> str:
    """Return the lines as a Markdown table."""
    head: tuple[str, ...] = (
        "model",
        "files",
        "requests before",
        "prompt",
        "read",
        "more than needed",
        "from",
    )
    head += ("other worker", "first token s")
    rows = [head, tuple("---" for _ in head)]
    for line in lines:
        rows.append(
            (
                line["model"],
                "shared" if line["has_disk"] else "none",
                str(line["after"]),
                f"{line['prompt']:,}",
                f"{line['prefilled']:,}",
                f"{line['excess']:,}",
                line["source"],
                "yes" if line["moved"] else "no",
                f"{line['ttft_s']:.2f}",
            )
        )
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)
