"""Greedy output through the whole chain against mlx_lm.stream_generate, token for token."""

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from mlx_lm.tokenizer_utils import load as load_tokenizer

from hearth.shared.paths import PROJECT_DIR
from hearth.worker.cache.block_hash import common_length, pack
from hearth.worker.stream.detokenise import Vocabulary
from scripts.fixtures.fixture_cache import TEXT_NAMES, fixture_dir, mlx_environment
from scripts.harness.warm.token_margins import COUNTED
from tests.helpers.by_day import by_day
from tests.helpers.servers.server import Server

TOKENS_MAX = 48
BITS_MAX = 8
NAMES = by_day(TEXT_NAMES, ("qwen3_5",))
TEXTS = [f"{n} tell me about caches {'and long tails ' * n}" for n in (1, 40, 150, 400)]


def reference(name: str, texts: Sequence[str], bits: Sequence[int]) -> list[list[int]]:
    """Return what mlx-lm answers to each text, with its embeddings scaled by so many last bits."""
    asked = [[TOKENS_MAX, text, each] for text in texts for each in bits]
    lines = "".join(json.dumps(each) + "\n" for each in asked)
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
        self.name = name
        self._client = client
        tokenizer = load_tokenizer(fixture_dir(name))
        self._vocabulary = Vocabulary(tokenizer)
        self._ids = {self._vocabulary.token_bytes(n): n for n in range(len(tokenizer))}
        assert len(self._ids) == len(tokenizer), "two tokens share their bytes"

    def tokens(self, text: str) -> tuple[list[int], str]:
        asked = {"model": self.name, "messages": [{"role": "user", "content": text}]}
        prompt = self._client.post("/apply-template", json=asked).json()["prompt"]
        body = {"model": self.name, "prompt": prompt, "raw": True, "stream": False}
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
    first, *others = TEXT_NAMES
    made = Server(
        MODEL_PATH=str(fixture_dir(first)),
        PROXY_MODEL_ID=first,
        MODELS=",".join(f"{name}={fixture_dir(name)}" for name in others),
    )
    with made as running:
        yield running


def assert_same(chain: Chain, text: str, expected: list[int], got: tuple[list[int], str]) -> None:
    """Assert that an answer is mlx-lm's, up to where a last bit has mlx-lm say the other token."""
    COUNTED.answers += 1
    COUNTED.tokens += len(got[0])
    if not chain.same(expected, got):
        at = common_length(pack(expected), pack(got[0]))
        turned = reference(chain.name, [text], range(-BITS_MAX, BITS_MAX + 1))
        assert any(other[: at + 1] == got[0][: at + 1] for other in turned), (expected, got)
        COUNTED.ties.append(f"{chain.name}, token {at}")


@pytest.mark.parametrize("name", NAMES)
def test_the_chain_answers_what_mlx_lm_answers(server: Server, name: str) -> None:
    expected = reference(name, TEXTS, [0])
    client = httpx.Client(base_url=server.url, timeout=60)
    with client, ThreadPoolExecutor(len(TEXTS)) as pool:
        chain = Chain(name, client)
        one_by_one = [chain.tokens(text) for text in TEXTS]
        together = list(pool.map(chain.tokens, TEXTS))
    for answers in (one_by_one, together):
        for text, whole, got in zip(TEXTS, expected, answers, strict=True):
            assert_same(chain, text, whole, got)
