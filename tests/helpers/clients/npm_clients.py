"""Installs the npm packages of the real agent clients; as a program, it installs all of them.

A client's files lie in HEARTH_CLIENTS (~/.cache/hearth/clients), installed there with npm once.
Standard library only: `.ci/run` installs them while nothing else is installed yet.
"""

import functools
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

NODE: Final = "node@24"
CLAUDE_CODE: Final = "@anthropic-ai/claude-code@2.1.332"
CODEX: Final = "@openai/codex@0.171.0"
OPENCODE: Final = "opencode-ai@1.18.33"
PI: Final = "@earendil-works/pi-coding-agent@1.6.0"
OPENCLAW: Final = "openclaw@2026.9.6"
QWEN_CODE: Final = "@qwen-code/qwen-code@0.24.4"
AXE: Final = "axe-core@4.14.1"  # no agent: it says what of a page is not accessible
OLLAMA: Final = "ollama@0.6.4"  # no agent: Ollama's own client, for JavaScript
INSTALL_WAIT_S_MAX: Final = 300
UNREACHABLE: Final = re.compile(
    r"ENOTFOUND|EAI_AGAIN|ECONNREFUSED|ECONNRESET|ETIMEDOUT|ENETUNREACH"
)


class NotInstallableError(Exception):
    """This machine has no npm, or npm has no registry."""


@functools.cache
def node_modules(package: str) -> Path:
    """Return the node_modules with `package` (name@version), installed on first use.

    Raises NotInstallableError where there is no npm or no registry to install from.
    """
    clients = Path(os.environ.get("HEARTH_CLIENTS", "~/.cache/hearth/clients")).expanduser()
    target = clients / re.sub("[/@]", "_", package)
    if not (target / "node_modules").is_dir():  # it comes there whole
        _install(package, target)
    return target / "node_modules"


def node_bin() -> Path:
    """Return the directory of a Node that is new enough for every client."""
    return node_modules(NODE) / "node" / "bin"


def _install(package: str, target: Path) -> None:
    if shutil.which("npm") is None:
        raise NotInstallableError(f"{package} cannot be installed: there is no npm on PATH")
    path = os.environ["PATH"]
    if package != NODE:
        path = f"{node_bin()}:{path}"
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".installing-", dir=target.parent) as scratch:
        made = Path(scratch) / target.name
        made.mkdir()
        (made / "package.json").write_text("{}")
        done = subprocess.run(
            ["npm", "install", "--no-audit", "--no-fund", package],
            cwd=made,
            env={**os.environ, "PATH": path},
            capture_output=True,
            text=True,
            timeout=INSTALL_WAIT_S_MAX,
        )
        if done.returncode and UNREACHABLE.search(done.stderr):
            raise NotInstallableError(
                f"{package} cannot be installed: npm does not reach its registry"
            )
        assert done.returncode == 0, done.stderr
        shutil.rmtree(target, ignore_errors=True)
        made.rename(target)


def main() -> int:
    """Install every client that can be installed here."""
    others = (AXE, OLLAMA)
    for package in (NODE, CLAUDE_CODE, CODEX, OPENCODE, PI, OPENCLAW, QWEN_CODE, *others):
        try:
            node_modules(package)
        except NotInstallableError as error:
            print(error, file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
