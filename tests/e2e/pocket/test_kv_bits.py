"""A request says in which bits its KV is held, and is told why where it cannot be."""

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.helpers.servers.server import Server

TEXT = "The harbor lies in the north. Boats come at seven and leave at nine. " * 20


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server(MODEL_PATH="builtin:pocket", QUANTIZED_KV_START="100") as made:
        yield made


def ask(client: openai.OpenAI, **extra: Any) -> tuple[str, dict[str, Any]]:
    """Return the answer, and what the usage tells of the cache."""
    told = client.chat.completions.create(
        model="pocket",
        messages=[{"role": "user", "content": TEXT}],
        max_tokens=20,
        temperature=0,
        extra_body={"enable_thinking": False, "session_id": "one"} | extra,
    )
    usage: Any = told.usage
    return told.choices[0].message.content or "", usage.kv_cache


def slots_of(server: Server) -> dict[int | None, int]:
    """Return the bytes of the live slots by their bits."""
    (worker,) = server.get("/v1/cache")["workers"]
    return {slot["bits"]: slot["bytes"] for slot in worker["slots"]}


def test_each_of_the_bits_has_kv_of_its_own_and_says_why_a_switch_cost(server: Server) -> None:
    with server.openai() as client:
        answers = {bits: ask(client, kv_bits=bits) for bits in (None, 4, 8)}
        again = {bits: ask(client, kv_bits=bits) for bits in (8, 4, None, 0)}
    assert [told["prefix_length"] for _, told in answers.values()] == [0, 0, 0]
    assert all(told["prefix_length"] > 200 for _, told in again.values())
    assert {bits: said for bits, (said, _) in again.items() if bits != 0} == {
        bits: said for bits, (said, _) in answers.items()
    }
    causes = [told["divergence"] and told["divergence"]["cause"] for _, told in answers.values()]
    assert causes == [None, "other kv_bits", "other kv_bits"]
    slots = slots_of(server)
    assert 0 < slots[4] < slots[8] < slots[None]


def test_bits_that_nothing_packs_are_a_400_that_names_them(server: Server) -> None:
    with server.openai() as client, pytest.raises(openai.BadRequestError) as caught:
        ask(client, kv_bits=5)
    assert caught.value.param == "kv_bits" and "0 or 4 or 8" in str(caught.value)


def test_exact_mode_tells_what_to_do_instead() -> None:
    with (
        Server(MODEL_PATH="builtin:pocket", CACHE_EXACT="true") as exact,
        exact.openai() as client,
        pytest.raises(openai.BadRequestError) as caught,
    ):
        ask(client, kv_bits=4)
    assert caught.value.code == "kv_bits_refused" and "CACHE_EXACT=false" in str(caught.value)
