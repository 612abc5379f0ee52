"""Adapters on a real server: named by requests, told by replies, metrics and rows, kept apart."""

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from hearth.shared.settings import load_settings
from hearth.worker.engine.model_loader import load_model
from scripts.fixtures.fixture_cache import fixture_dir
from scripts.harness.lora_files import write_adapter
from tests.helpers.servers.server import Server

TEXT = "The harbor lies in the north. Boats come at seven and leave at nine. " * 20
NAMES = ("local", "law", "code")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("adapters")
    model = load_model(load_settings({"MODEL_PATH": str(fixture_dir("qwen3"))}, None))
    law = write_adapter(directory / "law", model, 1, scale=128.0)
    code = write_adapter(directory / "code", model, 2, kind="dora", scale=64.0)
    with Server(ADAPTERS=f"law={law},code={code}") as made:
        yield made


def ask(client: openai.OpenAI, model: str, session: str) -> tuple[str, dict[str, Any], str]:
    """Return the answer, what the usage tells of the cache, and who answered."""
    told = client.chat.completions.with_raw_response.create(
        model=model,
        messages=[{"role": "user", "content": TEXT}],
        max_tokens=20,
        temperature=0,
        extra_body={"enable_thinking": False, "session_id": session},
    )
    answer: Any = told.parse()
    assert answer.model == model
    served_by = told.headers["x-hearth-served-by"]
    return answer.choices[0].message.content or "", answer.usage.kv_cache, served_by


def test_each_name_answers_with_its_own_kv_and_a_switch_is_told(server: Server) -> None:
    with server.openai() as client:
        first = {name: ask(client, name, "one") for name in NAMES}
        again = {name: ask(client, name, "one") for name in NAMES[::-1]}
    assert {name: by for name, (_, _, by) in first.items()} == {
        name: f"hearth/{name}" for name in NAMES
    }
    assert len({said for said, _, _ in first.values()}) == 3
    assert [told["prefix_length"] for _, told, _ in first.values()] == [0, 0, 0]
    assert all(told["prefix_length"] > 200 for _, told, _ in again.values())
    assert {name: said for name, (said, _, _) in again.items()} == {
        name: said for name, (said, _, _) in first.items()
    }
    causes = [told["divergence"] and told["divergence"]["cause"] for _, told, _ in first.values()]
    assert causes == [None, "other adapter", "other adapter"]
