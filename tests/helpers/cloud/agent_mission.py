"""Has a mock cloud work with an agent client's tools as the scripted local model does."""

import dataclasses
import functools
from itertools import pairwise
from typing import Any

from hearth.proxy.api.parse_any_dialect import BodyParser
from hearth.proxy.api.responses.response_store import ResponseStore
from hearth.shared.settings_from_env import load_settings
from tests.helpers.cloud.cloud_answers import CloudAnswer, CloudCall
from tests.helpers.servers.mock_cloud import PATHS, CloudRequest
from tests.helpers.worker_processes.scripted_worker import answer


@functools.cache
def _parser() -> BodyParser:
    return BodyParser(load_settings({}, None), ResponseStore())


def on_a_mission(request: CloudRequest) -> CloudAnswer:
    """Return what the scripted model says to the same request: files are read, then words told."""
    dialect = PATHS[request.path]
    assert dialect != "embeddings"
    body = {name: each for name, each in request.json.items() if name != "previous_response_id"}
    prompt = _parser().parsed(dialect, body, request.headers).prompt
    rows = prompt.messages  # a bridge may make two messages of one turn: they are one step
    is_more = [row["role"] == before["role"] == "assistant" for before, row in pairwise(rows)]
    turns = [row for row, more in zip(rows, [False, *is_more], strict=True) if not more]
    parts = answer(dataclasses.replace(prompt, messages=turns))
    calls = tuple(CloudCall(call.name, _object(call.arguments)) for call in parts.calls)
    return CloudAnswer(parts.content, parts.reasoning, calls=calls)


def _object(arguments: dict[str, Any] | str) -> dict[str, Any]:
    assert isinstance(arguments, dict), "the scripted model has no custom tools"
    return arguments
