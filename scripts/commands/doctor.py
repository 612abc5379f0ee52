"""Checks the model on this machine, and says what settings that are auto mean by it.

    hearth doctor
    hearth doctor --again
    hearth doctor --model mlx-community/Qwen3-8B-4bit

Where a server runs on the port, its report is shown; --again has it run the checks once more, in
the pauses between requests. Where none runs, the model is loaded here and checked, which takes
three minutes at most. The report is Markdown without prompts, names and paths: paste it into an
issue.
Exit status 0: no check found a fault; 1: one did; 2: nothing could be checked.
"""

import argparse
import asyncio
import functools
import os
import sys
from collections.abc import Sequence
from typing import Final

from hearth.commands.serve import add_settings, settings_of
from hearth.commands.server_client import ProbeError, Refused, Row, Server, run
from hearth.commands.take_port import can_listen
from hearth.shared.errors import StartError
from hearth.shared.linux_environment import openblas_environment
from hearth.shared.listen_addresses import url_of
from hearth.shared.process_start import temp_environment
from hearth.shared.settings import Settings
from hearth.worker.doctor.report_text import findings_of, report_text

PATH: Final = "/v1/doctor"
POLL_S: Final = 2.0
WAIT_S_MAX: Final = 1_800.0  # for a busy server's pauses


def options_of(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="hearth doctor",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_settings(parser)
    parser.add_argument("--key", help="of the server; else PROXY_API_KEY")
    parser.add_argument("--again", action="store_true", help="run the checks once more")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    given = list(sys.argv[2:] if arguments is None else arguments)
    options = options_of(given)
    try:
        settings = settings_of(options)
        if not can_listen(settings.proxy_host, settings.proxy_port):
            return run(_asked(settings, options))
        if settings.ranks > 1:
            raise StartError(
                f"RANKS is {settings.ranks}, and this checks a model that one process computes. "
                "hearth ranks check compares the ranks; RANKS=1 hearth doctor checks it whole."
            )
        _become_fast(given)
        return show([_checked(settings)])
    except (StartError, ProbeError) as error:
        print(f"verdict: none: {error}", file=sys.stderr)
        return 2


def show(reports: Sequence[Row]) -> int:
    """Print the reports; return the exit status."""
    status = 2
    for row in reports:
        if "error" in row:
            print(f"worker {row.get('worker', '-')}: {row['error']}", file=sys.stderr)
            continue
        print(report_text(row))
        found = findings_of(row)
        if found is not None and found.checks:
            status = 1 if found.faults or status == 1 else 0
    return status


# ---------------------------------------------------------------- a server that runs


async def _asked(settings: Settings, options: argparse.Namespace) -> int:
    """Show what a running server found, once it has."""
    key = options.key or settings.proxy_api_key or "local"
    url = url_of(settings.proxy_host, settings.proxy_port)
    async with Server(url, key, timeout_s=60) as server:
        try:
            told = await (server.post(PATH, {}, {}) if options.again else server.get(PATH))
        except Refused as refused:
            raise ProbeError(f"the server on {url} knows no {PATH}: {refused}") from refused
        rows: list[Row] = told["workers"]
        if options.again:
            rows = await _finished(server)
    return show(rows)


async def _finished(server: Server) -> list[Row]:
    """Return the reports once the checks have run; say meanwhile what they do."""
    said = ""
    for _ in range(int(WAIT_S_MAX / POLL_S)):
        await asyncio.sleep(POLL_S)
        rows: list[Row] = (await server.get(PATH))["workers"]
        busy = [row for row in rows if row.get("state") in ("running", "waiting")]
        if not busy:
            return rows
        now = busy[0]["running"] or "waiting for a pause between requests"
        if now != said:
            said = now
            print(now, file=sys.stderr)
    raise ProbeError(f"the server was too busy to be checked for {WAIT_S_MAX:.0f} s")


# ---------------------------------------------------------------- in this process


def _become_fast(arguments: Sequence[str]) -> None:
    """Start anew with a fast BLAS in front, where one is to be had (Linux only)."""
    more = openblas_environment(os.environ)
    if more:
        command = [sys.executable, "-P", "-m", "hearth.commands.main", "doctor", *arguments]
        os.execve(sys.executable, command, {**os.environ, **more})


def _checked(settings: Settings) -> Row:
    """Load the model, check it, and return the report. Raises: StartError."""
    # These take a second: after what may refuse.
    from hearth.worker.engine import mlx_lm_open_files, mlx_memory  # noqa: F401
    from hearth.worker.engine.forward_memory import forward_of
    from hearth.worker.engine.model_loader import load_model
    from hearth.worker.engine.system_state import MemoryUse
    from hearth.worker.schedule.memory_guard import MemoryGuard
    from hearth.worker.setup.doctor_setup import ModelDoctor
    from hearth.worker.setup.kv_setup import cut_rule_of, identify
    from hearth.worker.setup.memory_setup import workers_limit

    os.environ |= temp_environment(os.environ, settings.instance_dir)
    limit = workers_limit(settings)
    mlx_memory.set_memory_limit(limit)

    def admit(nbytes: int) -> None:
        mlx_memory.refuse_heavy(nbytes, settings.model_path, limit)

    name = functools.partial(identify, settings, lambda: False)
    loaded = load_model(settings, admit=admit, identify=name)
    doctor = ModelDoctor(settings, loaded, starts_itself=False)
    rule = cut_rule_of(loaded, doctor.settings)
    forward = forward_of(loaded, rule.grid)
    memory = MemoryGuard(lambda: limit, MemoryUse().bytes_used, forward.bytes_at)
    report: Row = doctor.check_now(rule, memory, lambda name: print(name, file=sys.stderr))
    return report


if __name__ == "__main__":
    sys.exit(main())
