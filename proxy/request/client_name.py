"""Names the program that sends a request, by its User-Agent: one word for ids, a name for people.

Nothing here is trusted: it groups what a program asks, and whoever forges it groups its own.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

CLAUDE_CODE_HEADER: Final = "x-claude-code-session-id"
PAGE_HEADER: Final = "x-hearth-page"  # of this server's own page, whose browser has its own name
AGENT_CHARS_MAX: Final = 512  # of a User-Agent, which are looked at
NAME_CHARS_MAX: Final = 32

# What a User-Agent begins with, in lower case -> the name for people. Seen in captured requests of
# each agent, and in the sources of the SDKs.
_NAMES: Final = {
    "claude-cli": "Claude Code",
    "codex_exec": "Codex",
    "codex_cli_rs": "Codex",
    "codex-tui": "Codex",
    "qwencode": "Qwen Code",
    "pi": "Pi",
    "openclaw": "OpenClaw",
    "ai-sdk": "AI SDK",
    "openai/python": "python openai",
    "asyncopenai/python": "python openai",
    "openai/js": "js openai",
    "anthropic/python": "python anthropic",
    "asyncanthropic/python": "python anthropic",
    "anthropic/js": "js anthropic",
    "ollama-python": "python ollama",
    "ollama-js": "js ollama",
    "ollama": "Ollama",
    "python-requests": "python requests",
    "python-httpx": "python httpx",
    "python-urllib": "python urllib",
    "code": "VS Code",
    "edg": "Edge",
}
_SDKS: Final = ("python", "js", "java", "go", "ruby")  # "OpenAI/Python 2.3.0": no version of it
# A browser says that it is all of its ancestors; these name no program of anyone's.
_ANCESTORS: Final = frozenset(
    ("mozilla", "applewebkit", "khtml", "gecko", "safari", "version", "mobile", "electron")
)
_BROWSERS: Final = frozenset(("chrome", "headlesschrome", "chromium"))
_PRODUCT: Final = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~/@-]+")
_VERSION: Final = re.compile(r"v?(\d{1,6})(?:\.(\d{1,6}))?")
_NO_NAME: Final = re.compile(r"[^A-Za-z0-9 ._+-]+")
_NO_WORD: Final = re.compile(r"[^a-z0-9]+")


@dataclass(frozen=True, slots=True)
class ClientName:
    """A program that sends requests; both are empty where it does not say what it is."""

    word: str = ""  # for ids, the same for every version: "claude-code"
    text: str = ""  # for people: "Claude Code 2.1"


def client_of(headers: Mapping[str, str]) -> ClientName:
    """Return which program sends; the names of `headers` are in lower case. Never raises."""
    if PAGE_HEADER in headers:
        return ClientName("hearth-page", "Hearth's page")
    products = _products(headers.get("user-agent", "")[:AGENT_CHARS_MAX])
    name, version = _chosen(products)
    if CLAUDE_CODE_HEADER in headers and name.lower() != "claude-cli":
        name, version = "claude-cli", ""
    name = _NAMES.get(name.lower(), name)
    name = _NO_NAME.sub(" ", name)[:NAME_CHARS_MAX].strip()
    word = _NO_WORD.sub("-", name.lower()).strip("-")
    if not word:
        return ClientName()
    found = _VERSION.match(version)
    told = ".".join(part for part in found.groups() if part) if found else ""
    return ClientName(word, f"{name} {told}".strip())


def _products(agent: str) -> list[tuple[str, str]]:
    """Return the products of a User-Agent with their versions, its comments left out."""
    words = _PRODUCT.findall(re.sub(r"\([^()]*\)", " ", agent))
    found: list[tuple[str, str]] = []
    for word in words:
        name, _, version = word.partition("/")
        if version.lower() in _SDKS:
            found.append((word, ""))
        elif not version and found and found[-1][0].lower().endswith(_SDKS) and not found[-1][1]:
            found[-1] = (found[-1][0], word)
        elif name:
            found.append((name, version.rpartition("/")[2]))
    return found


def _chosen(products: Sequence[tuple[str, str]]) -> tuple[str, str]:
    """Return the product that is the program: the first; of a browser's, the one that it is."""
    if not products:
        return "", ""
    first = products[0][0].lower()
    if first == "python" and len(products) > 1:  # "Python/3.12 aiohttp/3.9.5"
        return products[1]
    if first != "mozilla":
        return products[0]
    own = [row for row in products if row[0].lower() not in _ANCESTORS]
    named = [row for row in own if row[0].lower() not in _BROWSERS]
    return next(iter(named or own), ("Safari" if len(products) > 1 else "browser", ""))
