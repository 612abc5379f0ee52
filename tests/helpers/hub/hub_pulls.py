"""Runs `hearth pull` and its sisters in processes of their own, against a hub on this machine."""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from hearth.shared.paths import PROJECT_DIR
from scripts.fixtures.fixture_cache import fixture_dir
from tests.helpers.hub.local_hub import HubRepository, LocalHub
from tests.helpers.servers.server import free_port

HUB_ID: Final = "owner/tiny-model"
SHARDS: Final = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
SHARD_BYTES: Final = 4_000_000
PULL_S_MAX: Final = 600.0
STABLE_S: Final = 0.3  # without another byte
# The hub's library writes 10 MB at once: more than a shard here has.
MAIN: Final = (
    "import sys; from huggingface_hub import constants; constants.DOWNLOAD_CHUNK_SIZE = 64 * 1024; "
    "from hearth.commands.main import main; sys.exit(main(sys.argv[1:]))"
)


class PullHome:
    """A hub with one repository, and the home of a user who pulls from it."""

    def __init__(self, hub: LocalHub, home: Path) -> None:
        self.hub = hub
        self.home = home
        self.environment = {
            **{name: text for name, text in os.environ.items() if not name.startswith("HF_")},
            **hub.environment(home / "hf"),
            "HOME": str(home),
            "HEARTH_ENV_FILE": os.devnull,
            "PROXY_PORT": str(free_port()),  # where no server runs
            "COLUMNS": "200",
        }

    @property
    def repository(self) -> HubRepository:
        return self.hub.repositories[HUB_ID]

    @property
    def folder(self) -> Path:
        return self.home / "hf/hub" / f"models--{HUB_ID.replace('/', '--')}"

    @property
    def snapshot(self) -> Path:
        return self.folder / "snapshots" / self.repository.revision

    def partial_bytes(self) -> dict[str, int]:
        """Return what came of large files that are not whole, by digest."""
        found = self.folder.glob("blobs/*.incomplete")
        return {path.name.split(".")[0]: path.stat().st_size for path in found}

    def is_whole(self) -> bool:
        """Whether every file of the repository lies in the cache as the hub has it."""
        return all(
            (self.snapshot / name).read_bytes() == content
            for name, content in self.repository.files.items()
        )

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", MAIN, *arguments],
            cwd=PROJECT_DIR,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            # Tests that run in the background of a shell have been told to ignore Ctrl-C.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )

    def run(self, *arguments: str) -> tuple[int, str]:
        """Return a command's exit status and all that it said."""
        process = self.start(*arguments)
        said = "".join(process.communicate(timeout=PULL_S_MAX))
        return process.returncode, said

    def pull(self, *options: str) -> tuple[int, str]:
        return self.run("pull", HUB_ID, *options)

    def must_pull(self, *options: str) -> str:
        """Pull what comes to be here whole; return what is said."""
        status, said = self.pull(*options)
        assert status == 0 and self.is_whole(), said
        return said

    def must_refuse(self, *told: str) -> str:
        """Pull in vain, and be told so; return what is said."""
        status, said = self.pull()
        assert status == 1 and not [each for each in told if each not in said], said
        return said

    def _wait_for_bytes(self) -> None:
        """Wait until what the hub sent of both shards before it held them is on disk."""
        before: dict[str, int] = {}
        while self.repository.hold_at:
            here = self.partial_bytes()
            if here == before and len(here) == len(SHARDS) and all(here.values()):
                return
            before = here
            time.sleep(STABLE_S)

    def kill_once_reached(self) -> None:
        """Begin to pull, and kill that where the hub holds it."""
        process = self.start("pull", HUB_ID)
        assert self.hub.reached.wait(PULL_S_MAX), process.communicate()
        self._wait_for_bytes()
        process.send_signal(signal.SIGKILL)
        process.communicate()
        self.hub.reached.clear()


def repository() -> HubRepository:
    """Return a repository with a fixture's small files and two shards of noise."""
    source = fixture_dir("qwen3", tiny=True)
    files = {path.name: path.read_bytes() for path in source.iterdir() if path.suffix == ".json"}
    noise = random.Random(7)
    files |= {name: noise.randbytes(SHARD_BYTES) for name in SHARDS}
    return HubRepository(files)


@contextmanager
def pull_home(home: Path) -> Iterator[PullHome]:
    with LocalHub({HUB_ID: repository()}).running() as hub:
        yield PullHome(hub, home)
