"""Holds the faults of a chaos run; each function plays one fault and has lifted it when it returns.

Which of them a system lets be played `playable` tells; the others are named in the report.
"""

import asyncio
import contextlib
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import psutil

from hearth.shared.zmq_transport import SILENCE_S_MAX
from scripts.chaos.attacks import (
    connection_flood,
    half_closing,
    huge_bodies,
    poison_prompts,
    poison_schemas,
    smuggling,
)
from scripts.chaos.clients import GOOD, SMALL_BUFFER_BYTES, Manner, head
from scripts.chaos.judge_replies import Kind
from scripts.chaos.own_server import OwnServer, is_alive
from scripts.chaos.request_bodies import (
    BODY_BYTES_MAX,
    PATHS,
    TALKING,
    bulky,
    fresh,
    garbage,
    long,
    malformed,
    odd,
)
from scripts.chaos.scene import Play, Scene

STOP_S: Final = 3.0  # less than a server takes a worker for hung after
SLEEP_S: Final = 7.0  # longer than the lease of a request
DISK_S: Final = 6.0
PRESSURE_LEVELS: Final = ("NORMAL", "WARNING", "CRITICAL")
PRESSURE_CHANGES: Final = 6
PRESSURE_S_MAX: Final = 4.0
TOP_UP_S: Final = 0.1
DISK_BYTES: Final = 256 * 1024 * 1024
FILE_BYTES_MAX: Final = 4_096  # where the disk cannot be filled, files cannot grow
SLOW_READERS: Final = 8
LEAVERS: Final = 40
LEAVE_S_MAX: Final = 1.5
OVERSIZE_BYTES: Final = BODY_BYTES_MAX + 1
HUNG_S_MAX: Final = SILENCE_S_MAX + 10.0
GONE_S_MAX: Final = 5.0  # from the proxy's death to that of its workers
REFUSED: Final = frozenset[Kind](("refused",))
ODD: Final = GOOD | REFUSED
LEFT: Final = GOOD | frozenset[Kind](("left",))
# Whoever speaks no HTTP is owed an end of the connection, not an answer.
NO_HTTP: Final = frozenset[Kind](("answered", "refused", "cut"))

# ---------------------------------------------------------------- processes


def _worker(scene: Scene) -> psutil.Process | None:
    family = scene.server.look()
    return scene.rng.choice(family[1:]) if len(family) > 1 else None


def _signal(processes: Iterable[psutil.Process], number: signal.Signals) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)


async def worker_killed(scene: Scene) -> None:
    if (worker := _worker(scene)) is not None:
        _signal([worker], signal.SIGKILL)


async def worker_stopped(scene: Scene) -> None:
    """Stopped for a moment, then continued."""
    if (worker := _worker(scene)) is not None:
        _signal([worker], signal.SIGSTOP)
        await asyncio.sleep(STOP_S)
        _signal([worker], signal.SIGCONT)


async def worker_hung(scene: Scene) -> None:
    """Stopped and left so: the supervisor must kill it."""
    worker = _worker(scene)
    if worker is None:
        return
    _signal([worker], signal.SIGSTOP)
    if not await _gone([worker], HUNG_S_MAX):
        scene.ledger.miss(f"worker hung: not killed after {HUNG_S_MAX:g} s")
        _signal([worker], signal.SIGCONT)


async def all_stopped(scene: Scene) -> None:
    """The machine sleeps."""
    family = scene.server.look()
    _signal(family, signal.SIGSTOP)
    await asyncio.sleep(SLEEP_S)
    _signal(family, signal.SIGCONT)


async def proxy_killed(scene: Scene) -> None:
    """And started again at once, amid its workers' end."""
    family = scene.server.look()
    with scene.ledger.proxy_down():
        scene.server.process.kill()  # type: ignore[union-attr]
        scene.server.process.wait()  # type: ignore[union-attr]
        scene.server.start()
        if not await _gone(family, GONE_S_MAX):
            scene.ledger.miss(f"proxy killed: a worker outlived it by {GONE_S_MAX:g} s")
        if not await scene.server.until_ready(60.0):
            scene.ledger.miss(f"proxy killed: no start after it; {scene.server.log_tail(3)}")


async def _gone(processes: Iterable[psutil.Process], wait_s: float) -> bool:
    deadline = time.monotonic() + wait_s
    while time.monotonic() < deadline:
        if not any(is_alive(process) for process in processes):
            return True
        await asyncio.sleep(0.05)
    return False


# ---------------------------------------------------------------- the disk of KV_CACHE_DIR


def own_disk(directory: Path) -> bool:
    """Make `directory` a small disk in memory; say whether the system lets us."""
    command = [
        "mount",
        "-t",
        "tmpfs",
        "-o",
        f"size={DISK_BYTES},mode=0700",
        "tmpfs",
        str(directory),
    ]
    if sys.platform != "linux" or os.geteuid() != 0 or shutil.which("mount") is None:
        return False
    return subprocess.run(command, check=False, capture_output=True).returncode == 0


def drop_disk(directory: Path) -> None:
    if os.path.ismount(directory):
        subprocess.run(["umount", "-l", directory], check=False, capture_output=True)


async def disk_full(scene: Scene) -> None:
    if not os.path.ismount(scene.server.kv_dir):
        await _files_cannot_grow(scene)
        return
    ballast = scene.server.kv_dir / "ballast"
    deadline = time.monotonic() + DISK_S
    with ballast.open("wb", buffering=0) as file:
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError):  # full, which is what is wanted
                while file.write(bytes(1 << 20)):
                    pass
            await asyncio.sleep(TOP_UP_S)  # the server gives room back to write in: taken too
    ballast.unlink()


async def _files_cannot_grow(scene: Scene) -> None:
    """What a user without a disk of their own can do on Linux: EFBIG for ENOSPC."""
    prlimit: Any = resource.prlimit  # type: ignore[attr-defined, unused-ignore]
    workers = scene.server.look()[1:]
    before = [prlimit(worker.pid, resource.RLIMIT_FSIZE) for worker in workers]
    for worker, (_, hard) in zip(workers, before, strict=True):
        prlimit(worker.pid, resource.RLIMIT_FSIZE, (FILE_BYTES_MAX, hard))
    await asyncio.sleep(DISK_S)
    for worker, limits in zip(workers, before, strict=True):
        with contextlib.suppress(ProcessLookupError):
            prlimit(worker.pid, resource.RLIMIT_FSIZE, limits)


async def disk_read_only(scene: Scene) -> None:
    """Directories that take no file; root must have been started without its privilege."""
    home = scene.server.kv_dir
    for directory in _directories(home):
        directory.chmod(0o500)
    await asyncio.sleep(DISK_S)
    for directory in _directories(home):
        directory.chmod(0o700)


def _directories(home: Path) -> list[Path]:
    return [home, *(path for path in home.rglob("*") if path.is_dir())]


def launcher() -> tuple[str, ...]:
    """Return what starts a server that chmod binds: root may otherwise write anywhere."""
    if os.geteuid() != 0 or shutil.which("setpriv") is None:
        return ()
    taken = "-dac_override,-dac_read_search"
    return ("setpriv", f"--inh-caps={taken}", f"--bounding-set={taken}", "--")


# ---------------------------------------------------------------- memory


async def memory_pressure(scene: Scene) -> None:
    """The system says at random how short of memory it is, and at last that it is not."""
    levels = list(PRESSURE_LEVELS)
    for _ in range(PRESSURE_CHANGES):
        pressure_file(scene.server).write_text(scene.rng.choice(levels))
        await asyncio.sleep(scene.rng.random() * PRESSURE_S_MAX)
    pressure_file(scene.server).write_text(PRESSURE_LEVELS[0])


def pressure_file(server: OwnServer) -> Path:
    """Return the file that tells pressed workers what the system says."""
    return server.directory / "pressure"


# ---------------------------------------------------------------- clients


async def leavers(scene: Scene) -> None:
    """Clients that leave before their body is whole, before the first byte, or amid the answer."""

    async def leave() -> None:
        manner = Manner(
            leaves_s=scene.rng.random() * LEAVE_S_MAX,
            resets=scene.rng.random() < 0.5,
            sends_part=0.5 if scene.rng.random() < 0.2 else 1.0,
        )
        dialect = scene.rng.choice(list(PATHS))
        body = long(scene.rng, dialect) | {"stream": scene.rng.random() < 0.7}
        await scene.client.ask(dialect, body, manner, LEFT)

    await asyncio.gather(*(leave() for _ in range(LEAVERS)))


async def slow_readers(scene: Scene) -> None:
    manner = Manner(pause_s=scene.slow_s, buffer_bytes=SMALL_BUFFER_BYTES)
    bodies = [("chat", bulky(scene.rng)) for _ in range(SLOW_READERS // 2)]
    bodies += [
        (d, long(scene.rng, d)) for _, d in zip(range(SLOW_READERS // 2), PATHS, strict=True)
    ]
    await asyncio.gather(*(scene.client.ask(d, body, manner, GOOD) for d, body in bodies))


async def flood(scene: Scene) -> None:
    rng = scene.rng
    asked = [(dialect, fresh(rng, dialect, 20)) for dialect in rng.choices(TALKING, k=scene.flood)]
    bodies = [(dialect, body | {"stream": rng.random() < 0.5}) for dialect, body in asked]
    await asyncio.gather(*(scene.client.ask(d, body, allowed=GOOD) for d, body in bodies))


async def malformed_bodies(scene: Scene) -> None:
    for _, dialect, body in malformed():
        await scene.client.ask(dialect, body, allowed=REFUSED)
    for _, dialect, body in odd():
        await scene.client.ask(dialect, body, allowed=ODD)


async def oversized_bodies(scene: Scene) -> None:
    for dialect in TALKING:
        body = b'{"model": "pocket", "x": "' + b"a" * OVERSIZE_BYTES + b'"}'
        await scene.client.ask(dialect, body, allowed=REFUSED)
    claimed = head(scene.server.port, "chat", 1 << 40) + b"{"
    await scene.client.send("chat", claimed, Manner(leaves_s=2.0), LEFT | REFUSED)


async def garbage_heads(scene: Scene) -> None:
    for _, payload in garbage(scene.server.port):
        await scene.client.send("", payload, allowed=NO_HTTP)


PLAYS: Final[dict[str, Play]] = {
    "worker killed": worker_killed,
    "worker stopped": worker_stopped,
    "worker hung": worker_hung,
    "all stopped": all_stopped,
    "proxy killed": proxy_killed,
    "disk full": disk_full,
    "disk read-only": disk_read_only,
    "memory pressure": memory_pressure,
    "leavers": leavers,
    "slow readers": slow_readers,
    "flood": flood,
    "malformed": malformed_bodies,
    "oversized": oversized_bodies,
    "garbage": garbage_heads,
    "poison prompts": poison_prompts,
    "poison schemas": poison_schemas,
    "huge bodies": huge_bodies,
    "connection flood": connection_flood,
    "half-closing": half_closing,
    "smuggling": smuggling,
}
# What only clients do: any process outlives it, and it is part of the warm-up.
BY_CLIENTS: Final = (
    *("leavers", "slow readers", "flood", "malformed", "oversized", "garbage"),
    *("poison schemas", "huge bodies", "connection flood", "half-closing", "smuggling"),
)
ENDS_PROCESSES: Final = frozenset(
    ("worker killed", "worker hung", "proxy killed", "poison prompts")
)
# What must delay nobody else: all that clients do, but for asking much at once.
DELAYS_NOBODY: Final = frozenset(BY_CLIENTS) - {"leavers", "slow readers", "flood"}


def playable() -> dict[str, Play]:
    """Return the faults that this system lets be played."""
    found = dict(PLAYS)
    if sys.platform != "linux":
        del found["disk full"]
    if os.geteuid() == 0 and not launcher():
        del found["disk read-only"]
    return found
