"""Reads the documents: their blocks of code, links and names, and runs the blocks of shell.

A block with an HTML comment `<!-- not run: REASON -->` on the line above it is not run. All other
blocks of `sh` and `python` are run as they stand; only the server's address is another.
"""

import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
DOCUMENTED_URL: Final = "http://127.0.0.1:4000"
GUIDES: Final = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
LANGUAGES: Final = {"sh", "python", "json", "toml", "yaml", "dotenv", "mermaid", "text"}

_FENCE: Final = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_NOT_RUN: Final = re.compile(r"<!-- not run: (.+) -->\n\Z")
# The commands that ask a running server.
_ASKING: Final = "why|probe|probe-agent|cache|diff-turns|eval"


@dataclass(frozen=True, slots=True)
class CodeBlock:
    """One fenced block of code."""

    page: Path
    line: int
    language: str
    text: str
    not_run: str  # the reason; "" = it is run

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(page: Path) -> list[CodeBlock]:
    """Return the page's blocks, in their order."""
    text = page.read_text()
    found = []
    for fence in _FENCE.finditer(text):
        before = text[: fence.start()]
        reason = _NOT_RUN.search(before)
        line = before.count("\n") + 1
        found.append(CodeBlock(page, line, fence[1], fence[2], reason[1] if reason else ""))
    return found


def prose(page: Path) -> str:
    """Return the page without its blocks of code and its comments."""
    return re.sub(r"<!--.*?-->", "", _FENCE.sub("", page.read_text()), flags=re.DOTALL)


def code_spans(page: Path) -> list[str]:
    """Return what stands between single backticks, and the lines of blocks."""
    lines = [line for block in blocks(page) for line in block.text.splitlines()]
    return re.findall(r"`([^`\n]+)`", prose(page)) + lines


def anchors(page: Path) -> set[str]:
    """Return the anchors of the page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", _FENCE.sub("", page.read_text()), re.MULTILINE)
    plain = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings)
    return {each.replace(" ", "-") for each in plain}


class SnippetShell:
    """Runs snippets against one server, with a home and a `hearth` command of their own."""

    def __init__(self, url: str, environment: dict[str, str], home: Path) -> None:
        self.url = url
        commands = home / "bin"
        commands.mkdir(parents=True, exist_ok=True)
        python = shlex.quote(sys.executable)
        hearth = commands / "hearth"
        hearth.write_text(
            "#!/usr/bin/env bash\n"
            f'if [[ "$1" =~ ^({_ASKING})$ ]]; then set -- "$1" --base-url {url} "${{@:2}}"; fi\n'
            f'exec {python} -m hearth.commands.main "$@"\n'
        )
        hearth.chmod(0o700)
        path = f"{commands}{os.pathsep}{os.environ.get('PATH', '')}"
        self._environment = {**environment, "HOME": str(home), "PATH": path}

    def run(self, block: CodeBlock, timeout_s: float) -> subprocess.CompletedProcess[str]:
        """Run the block and return how it ended."""
        text = block.text.replace(DOCUMENTED_URL, self.url)
        text = text.replace(".venv/bin/python", shlex.quote(sys.executable))
        command = [sys.executable, "-c", text]
        if block.language == "sh":
            command = ["bash", "-euo", "pipefail", "-c", text]
        return subprocess.run(
            command,
            cwd=ROOT,
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )
