"""Greedy output through the whole chain against mlx_lm.stream_generate, token for token."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from mlx_lm.tokenizer_utils import load as load_tokenizer

from hearth.shared.settings_from_env import PROJECT_DIR
from hearth.worker.stream.detokenise import Vocabulary
from scripts.fixtures.fixture_cache import TEXT_NAMES, fixture_dir, mlx_environment
from tests.helpers.servers.server import Server

TOKENS_MAX = 48
# One of each kind of cache; all ten where somebody asks for more (HEARTH_EXAMPLES, any number).
EACH_KIND = ("qwen3", "qwen3_5", "gpt_oss", "deepseek_v32", "falcon_h1")
NAMES = TEXT_NAMES if os.environ.get("HEARTH_EXAMPLES") else EACH_KIND
TEXTS = [f"{n} tell me about caches {'and long tails ' * n}" for n in (1, 40, 150, 400)]


def reference(name: str) -> list[list[int]]:
    lines = "".join(json.dumps([TOKENS_MAX, text]) + "\n" for text in TEXTS)
    command = [
        sys.executable,
        "-W",
        "ignore",
        "tests/helpers/models/reference_answers.py",
        str(fixture_dir(name)),
    ]
    done = subprocess.run(
        command,
        input=lines,
        capture_output=True,
        text=True,
        cwd=PROJECT_DIR,
        env={**mlx_environment(), "PYTHONPATH": str(PROJECT_DIR)},
        timeout=120,
        check=True,
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


class Chain:
    """A fixture behind a server, asked for token ids by way of their log probabilities' bytes.

    They are asked for raw: of a chat's tokens only those of its content have log probabilities.
    """

    def __init__(self, name: str, client: httpx.Client) -> None:
        self._name = name
        self._client = client
        tokenizer = load_tokenizer(fixture_dir(name))
        self._vocabulary = Vocabulary(tokenizer)
        self._ids = {self._vocabulary.token_bytes(n): n for n in range(len(tokenizer))}
        assert len(self._ids) == len(tokenizer), "two tokens share their bytes"

    def tokens(self, text: str) -> tuple[list[int], str]:
        asked = {"model": self._name, "messages": [{"role": "user", "content": text}]}
        prompt = self._client.post("/apply-template", json=asked).json()["prompt"]
        body = {"model": self._name, "prompt": prompt, "raw": True, "stream": False}
        options = {"temperature": 0, "num_predict": TOKENS_MAX, "repeat_penalty": 1.0}
        told = body | {"options": options, "logprobs": True}
        answer = self._client.post("/api/generate", json=told).json()
        ids = [self._ids[bytes(entry["bytes"])] for entry in answer["logprobs"]]
        return ids, answer["done_reason"]

    def same(self, expected: list[int], got: tuple[list[int], str]) -> bool:
        """Whether they are the same but for a character at the end that is not whole.

        The end-of-turn token is part of what mlx-lm yields and no part of our text.
        """
        ids, reason = got
        whole = expected[:-1] if reason == "stop" else expected
        rest = b"".join(map(self._vocabulary.token_bytes, whole[len(ids) :]))
        return ids == whole[: len(ids)] and not rest.decode("utf-8", "ignore")


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """One server for all of them: who is asked gets the worker."""
    first, *others = NAMES
    made = Server(
        MODEL_PATH=str(fixture_dir(first)),
        PROXY_MODEL_ID=first,
        MODELS=",".join(f"{name}={fixture_dir(name)}" for name in others),
    )
    with made as running:
        yield running


@pytest.mark.parametrize("name", NAMES)
def test_the_chain_answers_what_mlx_lm_answers(server: Server, name: str) -> None:
    expected = reference(name)
    client = httpx.Client(base_url=server.url, timeout=60)
    with client, ThreadPoolExecutor(len(TEXTS)) as pool:
        chain = Chain(name, client)
        one_by_one = [chain.tokens(text) for text in TEXTS]
        together = list(pool.map(chain.tokens, TEXTS))
    for got in (one_by_one, together):
        assert all(chain.same(e, g) for e, g in zip(expected, got, strict=True))
