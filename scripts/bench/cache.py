"""Measures what the prefix cache saves, against the ideal cache and beside mlx_lm.server.

Each trace is replayed on Hearth and then on mlx_lm.server, both just started, so that each begins
cold. Both are held to the ideal of the token ids that Hearth tells. mlx_lm.server speaks chat
completions only: Messages and Responses are converted for it. The micro figures need no server;
cache_micro.py measures them in a process of its own, with the BLAS that workers have.
"""

import argparse
import asyncio
import contextlib
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import aiohttp

from hearth.commands.replay.player import Row, Target, replay
from hearth.commands.replay.traces import TRACES_DIR, Captured, load_trace
from scripts.bench.serve import machine
from scripts.bench.servers import (
    PROJECT_DIR,
    SideError,
    free_port,
    mlx_environment,
    ready,
    running,
)
from scripts.fixtures.fixture_cache import fixture_dir
from scripts.replay.__main__ import held_to, report, row_line, summary

ABOUT = "prefilled tokens beside the ideal and mlx_lm.server; what lookups, copies and cuts cost"
FIXTURES = "qwen3,qwen3_5,gpt_oss"
OTHERS = ("rapid-mlx", "vllm-mlx")
KEY = "bench"
REQUEST_WAIT_S_MAX = 3600.0
# What Hearth's templates are given unless a request says otherwise, so that prompts are alike.
THINKING = {"chat_template_kwargs": {"enable_thinking": True}}
SETTINGS = {
    "PROXY_HOST": "127.0.0.1",
    "PROXY_API_KEY": KEY,
    "CACHE_DEBUG": "true",
    "CACHE_RAM_BUDGET_MB": "4096",
    "MAX_KV_SIZE": "262144",
    "WORKERS": "1",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--fixtures", default=FIXTURES, help=f"default {FIXTURES}")
    parser.add_argument("--tiny", action="store_true", help="two layers: for counts, not times")
    parser.add_argument("--traces", default="", help="names, comma-separated; default all")
    parser.add_argument("--traces-dir", type=Path, default=TRACES_DIR)
    parser.add_argument("--limit", type=int, default=0, help="requests of each trace; 0 = all")
    parser.add_argument("--max-tokens", type=int, default=8)
    parser.add_argument("--only", choices=("replay", "micro"), help="one part of it")
    parser.add_argument("--pairs", type=int, default=20, help="of the cold-request comparison")
    parser.add_argument("--json", type=Path, help="default bench/cache-<host>.json")


def run(options: argparse.Namespace) -> None:
    """Measure, print the tables, and write the JSON after each line of them."""
    out = options.json or PROJECT_DIR / "bench" / f"cache-{platform.node()}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    told: dict[str, Any] = {**machine(), "settings": SETTINGS, "limit": options.limit, "lines": []}
    told["max_tokens"] = options.max_tokens

    def save() -> None:
        out.write_text(json.dumps(told, indent=1) + "\n")

    if options.only != "micro":
        told["others"] = {name: _other(name) for name in OTHERS}
        for name, text in told["others"].items():
            print(f"{name}: {text}")
        asyncio.run(_replays(options, told["lines"], save))
        print(table(told["lines"]))
    if options.only != "replay":
        told["micro"] = micro(options.fixtures, options.pairs)
    told["load_after"] = os.getloadavg()
    save()
    print(f"written to {out}")


def _other(name: str) -> str:
    path = shutil.which(name)
    return "not found on PATH" if path is None else f"found at {path}, not measured"


def micro(fixtures: str, pairs: int) -> dict[str, Any]:
    """Measure without servers, in a child with a fast BLAS; it prints as it goes."""
    with tempfile.TemporaryDirectory(prefix="hearth-bench-") as directory:
        out = Path(directory) / "micro.json"
        command = [sys.executable, "-m", "scripts.bench.cache_micro", "--json", str(out)]
        command += ["--fixtures", fixtures, "--pairs", str(pairs)]
        subprocess.run(command, cwd=PROJECT_DIR, env=mlx_environment(), check=True)
        figures: dict[str, Any] = json.loads(out.read_text())
        return figures


# ---------------------------------------------------------------- replaying


def traces(options: argparse.Namespace) -> list[list[Captured]]:
    """Return the sessions to replay."""
    directory: Path = options.traces_dir
    names = [name for name in options.traces.split(",") if name]
    paths = [directory / f"{name}.jsonl.xz" for name in names]
    paths = paths or sorted(directory.glob("*.jsonl.xz"))
    if missing := [str(path) for path in paths if not path.exists()]:
        raise SystemExit(f"there is no {', '.join(missing)}")
    if not paths:
        raise SystemExit(f"there are no traces in {directory}; say where with --traces-dir")
    return [load_trace(path, options.limit) for path in paths]


async def _replays(
    options: argparse.Namespace, lines: list[dict[str, Any]], save: Callable[[], None]
) -> None:
    for fixture in options.fixtures.split(","):
        model = fixture_dir(fixture, tiny=options.tiny).resolve()
        for captured in traces(options):
            print(f"\n{fixture} {captured[0].trace}", file=sys.stderr)
            line = {"fixture": fixture, "trace": captured[0].trace}
            line["dialects"] = sorted({row.dialect for row in captured})
            lines.append(line | await _line(model, captured, options.max_tokens))
            save()


async def _line(model: Path, captured: Sequence[Captured], tokens_max: int) -> dict[str, Any]:
    """Return what both servers made of one session; a side that failed says how."""
    line: dict[str, Any] = {}
    rows: list[Row] = []
    for name, starter in (("hearth", _hearth), ("mlx_lm", _mlx_lm_server)):
        print(name, file=sys.stderr)
        try:
            async with starter(model, tokens_max) as target:
                done, wall_s = await replay(captured, target, _tell)
                line |= await _cache_report(target) if name == "hearth" else {}
        except (SideError, aiohttp.ClientError, TimeoutError) as error:
            line[name] = {"error": f"{type(error).__name__} {error}"}
            continue
        if name == "hearth":
            rows = done
        elif rows:
            done = held_to(done, [row.ids for row in rows])
        line[name] = report(done, summary(done, wall_s))
    return line


def _tell(row: Row) -> None:
    print(row_line(row), file=sys.stderr)


async def _cache_report(target: Target) -> dict[str, Any]:
    """Return what the cache tells at the end: its use, counts and evictions."""
    headers = {"authorization": f"Bearer {target.key}"}
    try:
        async with (
            aiohttp.ClientSession(target.base_url, headers=headers) as session,
            session.get("/v1/cache") as response,
        ):
            if response.status != 200:
                return {}
            told = await response.json()
    except aiohttp.ClientError:  # a server that has died failed its requests too
        return {}
    return {"cache": [{k: v for k, v in row.items() if k != "entries"} for row in told["workers"]]}


Starter = Callable[[Path, int], AbstractAsyncContextManager[Target]]


@contextlib.asynccontextmanager
async def _hearth(model: Path, tokens_max: int) -> AsyncIterator[Target]:
    """Run Hearth with an ample cache that tells its prompts' ids."""
    with tempfile.TemporaryDirectory(prefix="hearth-bench-") as directory:
        port, log = free_port(), Path(directory) / "hearth.log"
        environment = os.environ | SETTINGS
        environment |= {"MODEL_PATH": str(model), "PROXY_PORT": str(port)}
        environment |= {"RUN_DIR": f"{directory}/run", "LOG_ROOT": f"{directory}/logs"}
        environment |= {"KV_CACHE_DIR": f"{directory}/kv"}  # an earlier run's would be found
        target = Target(
            f"http://127.0.0.1:{port}", KEY, tokens_max=tokens_max, timeout_s=REQUEST_WAIT_S_MAX
        )
        async with _started(["-m", "hearth.proxy.main"], environment, log, target):
            yield target


@contextlib.asynccontextmanager
async def _mlx_lm_server(model: Path, tokens_max: int) -> AsyncIterator[Target]:
    """Run mlx_lm.server with its own defaults."""
    with tempfile.TemporaryDirectory(prefix="hearth-bench-") as directory:
        port, log = free_port(), Path(directory) / "mlx_lm.log"
        command = ["-m", "mlx_lm", "server", "--model", str(model), "--port", str(port)]
        target = Target(
            f"http://127.0.0.1:{port}",
            model="default_model",
            tokens_max=tokens_max,
            timeout_s=REQUEST_WAIT_S_MAX,
            is_chat_only=True,
            extra=THINKING,
        )
        async with _started(command, mlx_environment(), log, target):
            yield target


@contextlib.asynccontextmanager
async def _started(
    command: list[str], environment: dict[str, str], log: Path, target: Target
) -> AsyncIterator[None]:
    headers = {"authorization": f"Bearer {target.key}"}
    async with (
        running(command, environment, log) as child,
        aiohttp.ClientSession(target.base_url, headers=headers) as session,
    ):
        await ready(session, child, log)
        yield


# ---------------------------------------------------------------- reporting

COLUMNS = (
    "fixture",
    "trace",
    "mlx_lm gets",
    "requests",
    "prompt",
    "ideal",
    "Hearth prefilled",
    "ratio",
    "hit",
    "mlx_lm prefilled",
    "ratio",
    "hit",
    "TTFT p50 s, Hearth",
    "mlx_lm",
)


def table(lines: Sequence[dict[str, Any]]) -> str:
    """Return the lines as a Markdown table, with notes on what its figures leave out."""
    rows = [COLUMNS, tuple("---" for _ in COLUMNS), *(_cells(line) for line in lines)]
    text = ["| " + " | ".join(row) + " |" for row in rows]
    text += [
        "",
        "ideal: tokens in no earlier prompt of the session, at least one a request. ratio: "
        "prefilled / ideal. (r) requests refused with a 4xx are left out, (f) failed.",
        "mlx_lm.server runs with its defaults (10 sequences kept); what it gets converted has the "
        "messages and tools that Hearth reads. It is held to the ideal of Hearth's ids.",
    ]
    return "\n".join([*text, *_notes(lines)])


def _cells(line: dict[str, Any]) -> tuple[str, ...]:
    hearth, other = _sums(line["hearth"]), _sums(line["mlx_lm"])
    is_converted = line["dialects"] != ["chat"]
    return (
        line["fixture"],
        line["trace"],
        "converted" if is_converted else "as captured",
        _count(hearth),
        f"{hearth['prompt']:,}" if hearth else "-",
        f"{hearth['ideal']:,}" if hearth and hearth["ideal"] is not None else "not known",
        *_figures(hearth),
        *_figures(other),
        _seconds(hearth),
        _seconds(other),
    )


def _sums(side: dict[str, Any]) -> dict[str, Any]:
    """Return a side's sums; nothing where it failed."""
    sums: dict[str, Any] = side.get("summary", {})
    return sums


def _count(sums: dict[str, Any]) -> str:
    if not sums:
        return "-"
    marks = [f"{sums[name]}{name[0]}" for name in ("refused", "failed") if sums[name]]
    return f"{sums['requests']}" + (f" ({', '.join(marks)})" if marks else "")


def _figures(sums: dict[str, Any]) -> tuple[str, str, str]:
    if not sums:
        return "failed", "-", "-"
    prefilled = f"{sums['prefilled']:,}" + (f" ({sums['failed']}f)" if sums["failed"] else "")
    return prefilled, _four(sums["ratio"]), _four(sums["hit"])


def _four(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def _seconds(sums: dict[str, Any]) -> str:
    value = sums.get("ttft_p50_s")
    return "-" if value is None else f"{value:.2f}"


def _notes(lines: Sequence[dict[str, Any]]) -> list[str]:
    notes = []
    for line in lines:
        where = f"{line['fixture']} {line['trace']}"
        for name in ("hearth", "mlx_lm"):
            if error := line[name].get("error"):
                notes.append(f"{where}: {name} failed: {error}")
        if count := _sums(line["mlx_lm"]).get("other_lengths"):
            notes.append(f"{where}: {count} prompts are not as long on mlx_lm.server as on Hearth")
    return notes
