"""Each dialect's usage tells of the prompt, the cache, and what came of drafts."""

from hearth.proxy.api import chat_completions_events
from hearth.proxy.api.answer_fields import extra_fields
from hearth.proxy.api.messages import messages_events
from hearth.proxy.api.responses import responses_events
from hearth.shared.wire_messages import Usage


def test_usage_counts_the_cached_tokens_inside_the_prompt() -> None:
    told = chat_completions_events.usage_fields(Usage(10, 4, 6, 3, 1, "ram", 9))
    assert told["total_tokens"] == 13
    assert told["prompt_tokens_details"] == {"cached_tokens": 4}
    seen = chat_completions_events.usage_fields(Usage(10, 4, 6, 3, image_tokens=5))
    assert seen["prompt_tokens_details"] == {"cached_tokens": 4, "image_tokens": 5}
    assert told["kv_cache"] == {
        "cache_hit": True,
        "prefix_length": 4,
        "canonical_length": 0,
        "matched_length": 0,
        "prefilled": 6,
        "source": "ram",
        "match": "none",
        "ttft_ms": 9,
        "idle_tokens": 0,
        "divergence": None,
    }
    longer = Usage(10, 4, 6, 3, matched_tokens=7, canonical_tokens=2, idle_tokens=5)
    row = chat_completions_events.usage_fields(longer)["kv_cache"]
    assert (row["matched_length"], row["canonical_length"], row["idle_tokens"]) == (7, 2, 5)
    looked = Usage(10, 4, 6, 3, image_tokens=5, image_ms=0, match="prefix")
    told = chat_completions_events.usage_fields(looked)
    assert (told["kv_cache"]["match"], told["kv_cache"]["image_ms"]) == ("prefix", 0)
    assert not chat_completions_events.usage_fields(Usage(10, 0, 10, 3))["kv_cache"]["cache_hit"]
    lost = {"message": 3, "cause": "client_edit"}
    told = chat_completions_events.usage_fields(Usage(10, 0, 10, 3, divergence=lost))
    assert told["kv_cache"]["divergence"] == lost


def test_usage_tells_what_came_of_drafts_in_each_dialect() -> None:
    usage = Usage(
        *(10, 4, 6, 30),
        accepted_prediction_tokens=18,
        rejected_prediction_tokens=10,
        decode_forwards=12,
    )
    drafted = {"accepted_prediction_tokens": 18, "rejected_prediction_tokens": 10}
    chat = chat_completions_events.usage_fields(usage)
    responses = responses_events.usage_fields(usage)
    messages = messages_events.usage_fields(usage, is_marked=False)
    assert chat["completion_tokens_details"] == {"reasoning_tokens": 0} | drafted
    assert responses["output_tokens_details"] == {"reasoning_tokens": 0}, "it has no such fields"
    for told in (chat, responses, messages):
        assert told["speculation"] == drafted | {"decode_forwards": 12}
        assert extra_fields(usage).items() <= told.items()
