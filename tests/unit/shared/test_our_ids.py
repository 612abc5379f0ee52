"""Ids of ours are told from those of providers by their form alone."""

import re
import uuid

from hearth.shared.our_ids import (
    SIGNATURE_BEGIN,
    is_our_call_id,
    is_our_item_id,
    is_our_response_id,
    is_our_signature,
    new_id,
    response_maker,
)

OPENAI = "68af4030592c81938ec0a5fbab4a3e9f05438e46b5f69a3b"
ANTHROPIC = "EqoBCkgIARABGAIiQL2UoU0b1OHYi+" + "x" * 200 + "=="


def test_what_is_made_here_is_told_as_ours() -> None:
    request_id = uuid.uuid4().hex  # as HttpExchange names a request
    assert is_our_call_id(new_id())
    assert is_our_signature(SIGNATURE_BEGIN + new_id())
    assert is_our_response_id(f"resp_{request_id}")
    for kind in ("msg", "rs", "fc", "ctc", "tsc", "in"):
        assert is_our_item_id(f"{kind}_{request_id}_0")


def test_signatures_of_older_sessions_are_ours_as_well() -> None:
    assert is_our_signature(new_id())


def test_ids_of_calls_fit_what_every_provider_takes() -> None:
    assert all(re.fullmatch(r"[a-zA-Z0-9_-]{1,40}", new_id()) for _ in range(100))


def test_what_a_provider_made_is_not_ours() -> None:
    for call_id in ("toolu_01A09q90qw90lq917835lq9", "call_abc123", "functions.f:0", "", None, 7):
        assert not is_our_call_id(call_id)
    for signature in (ANTHROPIC, "", None, ["a"], "litellm_enc:bW9kZWw=;gAAAA", "a" * 21):
        assert not is_our_signature(signature)
    for response_id in (f"resp_{OPENAI}", f"resp_{uuid.uuid4()}", "resp_", None):
        assert not is_our_response_id(response_id)
    for item_id in (f"msg_{OPENAI}", f"rs_{OPENAI}", f"fc_{uuid.uuid4()}", "encitem_bGl0", None):
        assert not is_our_item_id(item_id)


def test_litellms_id_of_a_response_that_its_provider_keeps_names_the_deployment() -> None:
    native = (
        "resp_bGl0ZWxsbTpjdXN0b21fbGxtX3Byb3ZpZGVyOm9wZW5haTttb2RlbF9pZDpkZXAtMTtyZXNwb25zZV9pZDpy"
        "ZXNwX2FiYzEyMw=="
    )
    bridged = (
        "resp_bGl0ZWxsbTpjdXN0b21fbGxtX3Byb3ZpZGVyOmFudGhyb3BpYzttb2RlbF9pZDpkZXAtMjtyZXNwb25zZV9p"
        "ZDpjaGF0Y21wbC0xMjM="
    )
    assert response_maker(native) == "dep-1"
    for other in (bridged, native[5:], f"resp_{OPENAI}", "resp_", "resp_\xe9", "resp_////"):
        assert response_maker(other) == ""
