"""Checks which program a request is said to come from, by its User-Agent."""

import pytest
from hypothesis import given, strategies as st

from hearth.proxy.request.client_name import NAME_CHARS_MAX, client_of

CHROME = "Mozilla/5.0 (Macintosh) AppleWebKit/537.36 (KHTML, like Gecko) Chrome/141.0.0.0"
AGENTS = {  # as the programs send them: captured requests, and the SDKs' sources
    "claude-cli/2.1.329 (external, cli)": ("claude-code", "Claude Code 2.1"),
    "codex_exec/0.169.0 (Debian 12.0.0; x86_64) xterm-256color": ("codex", "Codex 0.169"),
    "opencode/1.18.33 ai-sdk/provider-utils/4.0.23": ("opencode", "opencode 1.18"),
    "QwenCode/0.24.4 (linux; x64)": ("qwen-code", "Qwen Code 0.24"),
    "pi (linux 6.18.44; x64)": ("pi", "Pi"),
    "ai-sdk/openai-compatible/3.0.37 runtime/bun/1.3.13": ("ai-sdk", "AI SDK 3.0"),
    "OpenAI/JS 7.15.0": ("js-openai", "js openai 7.15"),
    "OpenAI/Python 2.3.0": ("python-openai", "python openai 2.3"),
    "AsyncOpenAI/Python 2.3.0": ("python-openai", "python openai 2.3"),
    "Python/3.12 aiohttp/3.9.5": ("aiohttp", "aiohttp 3.9"),
    "curl/8.5.0": ("curl", "curl 8.5"),
    f"{CHROME} Safari/537.36": ("chrome", "Chrome 141.0"),
    f"{CHROME} CherryStudio/1.5.1 Electron/31 Safari/537.36": ("cherrystudio", "CherryStudio 1.5"),
    "Mozilla/5.0 (X11; rv:130.0) Gecko/20100101 Firefox/130.0": ("firefox", "Firefox 130.0"),
    "Mozilla/5.0 (Mac) AppleWebKit/605 Version/18.1 Safari/605": ("safari", "Safari"),
    "node": ("node", "node"),
    "": ("", ""),
    "\u202e\x1b[31m": ("31m", "31m"),
    "()()": ("", ""),
}


@pytest.mark.parametrize("agent", AGENTS)
def test_a_program_has_a_word_for_ids_and_a_name_for_people(agent: str) -> None:
    client = client_of({"user-agent": agent})
    assert (client.word, client.text) == AGENTS[agent]


def test_claude_codes_header_names_it_whatever_speaks_for_it() -> None:
    client = client_of({"x-claude-code-session-id": "s", "user-agent": "node"})
    assert (client.word, client.text) == ("claude-code", "Claude Code")


@given(st.text(max_size=700))
def test_whatever_is_sent_gives_a_short_name_that_can_be_printed(agent: str) -> None:
    client = client_of({"user-agent": agent})
    assert len(client.word) <= NAME_CHARS_MAX and len(client.text) <= NAME_CHARS_MAX + 16
    assert client.text.isprintable() and client.text.isascii()
    assert set(client.word) <= set("abcdefghijklmnopqrstuvwxyz0123456789-")
    assert bool(client.word) == bool(client.text)
