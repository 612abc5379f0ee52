"""What a worker has computed is there for the next one: warm from disk equals cold."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.machine import ROOT, Answer, Machine, loaded, machine
from worker.disk.courier import Courier
from worker.disk.shelf import Shelf

GB = 1 << 30
TEXT = "The harbor lies in the north. Boats come at seven and leave at nine. " * 8


@pytest.fixture
def workers(tmp_path: Path) -> Iterator["Workers"]:
    made = Workers(tmp_path)
    yield made
    made.kill()


class Workers:
    """One worker after another on one directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._courier: Courier | None = None

    def start(self, name: str, **rules: bool) -> Machine:
        self.kill()
        self._courier = Courier(Shelf(self._directory, ROOT, GB, 0))
        return machine(name, courier=self._courier, **rules)

    def flush(self) -> None:
        assert self._courier is not None
        assert self._courier.flush(20)

    def kill(self) -> None:
        if self._courier is not None:
            self._courier.close()


def prompt(name: str, *said: str) -> list[int]:
    text = "".join(f"<|im_start|>user\n{part}<|im_end|>\n" for part in said)
    ids: list[int] = loaded(name).tokenizer.encode(text + "<|im_start|>assistant\n")
    return ids


def assert_same(warm: Answer, cold: Answer, is_exact: bool) -> None:
    assert warm.tokens == cold.tokens
    for one, other in zip(warm.logits, cold.logits, strict=True):
        assert np.array_equal(one, other) if is_exact else np.allclose(one, other, atol=1e-3)


@pytest.mark.parametrize("is_exact", [True, False])
@pytest.mark.parametrize("name", ["qwen3", "qwen3_5", "gpt_oss", "falcon_h1", "gemma3_text"])
def test_a_conversation_goes_on_in_another_worker(
    workers: Workers, name: str, is_exact: bool
) -> None:
    asked = prompt(name, TEXT)
    first = workers.start(name, is_exact=is_exact)
    answer = first.ask(asked)
    workers.flush()
    end = loaded(name).tokenizer.encode("<|im_end|>\n<|im_start|>user\nAnd then?<|im_end|>\n")
    following = [*asked, *answer.request.sampled, *end]
    second = workers.start(name, is_exact=is_exact)
    cold = machine(name, keeps=False, is_exact=is_exact)
    warm = second.ask(following)
    assert warm.usage is not None and warm.usage.source == "ssd"
    kept = len(asked) - 2 if is_exact else len(asked) + len(answer.request.sampled) - 2
    assert warm.cached >= kept - (64 if is_exact else 0), (warm.cached, kept)
    assert_same(warm, cold.ask(following), is_exact)
    second.check()


def test_an_emptied_cache_is_empty_on_disk_too(workers: Workers) -> None:
    asked = prompt("qwen3", TEXT)
    first = workers.start("qwen3")
    first.ask(asked)
    workers.flush()
    first.scheduler.forget()
    again = first.ask(asked)
    assert again.cached == 0 and again.usage is not None and again.usage.source == "none"
    first.scheduler.forget()
    assert workers.start("qwen3").ask(asked).cached == 0
