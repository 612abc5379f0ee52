"""Makes captured rows and chat streams for the tests of replays."""

from typing import Any

from hearth.commands.replay.traces import Captured

KV = {"cache_hit": True, "prefix_length": 90, "prefilled": 12, "source": "ram", "divergence": None}


def chat_events() -> list[Any]:
    def chunk(finish: str | None = None, **delta: Any) -> dict[str, Any]:
        return {"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}

    usage = {
        "prompt_tokens": 100,
        "completion_tokens": 8,
        "prompt_tokens_details": {"cached_tokens": 90},
    }
    return [
        chunk(role="assistant", content=""),
        chunk(reasoning_content="hm "),
        chunk(content="one "),
        chunk(content="two"),
        chunk(content="", provider_specific_fields={"kv_cache": KV}),
        chunk("length"),
        {"choices": [], "usage": usage},
    ]


def captured(dialect: str, body: dict[str, Any], said: str = "", **times: Any) -> Captured:
    whole: dict[str, Any] = {"trace": "a", "began_s": 0.0, "ended_s": 1.0} | times
    return Captured(dialect=dialect, path="/v1/x", headers={}, body=body, said=said, **whole)
