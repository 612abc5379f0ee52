"""Responses that cloud models made are gone on from here and there, each key from its own."""

import base64
import uuid
from pathlib import Path
from typing import Any

import pytest

from hearth.proxy.api.responses import response_store
from hearth.proxy.api.responses.response_store import AGE_S_MAX, ResponseStore
from hearth.shared.errors import RequestError

THEIRS = "68af4030592c81938ec0a5fbab4a3e9f"
SEALED = "gAAAAB" + "x" * 100


def encoded(deployment: str, response_id: str) -> str:
    """Return a response's id as LiteLLM gives it to clients."""
    told = f"litellm:custom_llm_provider:openai;model_id:{deployment};response_id:{response_id}"
    return "resp_" + base64.b64encode(told.encode()).decode()


NATIVE = encoded("dep-a", "resp_abc")
BRIDGED = encoded("dep-a", "chatcmpl-abc")
OUR_HEX = uuid.uuid4().hex
OURS = f"resp_{OUR_HEX}"
THOUGHT = {"type": "reasoning", "id": f"rs_{THEIRS}", "summary": [], "encrypted_content": SEALED}
PART = {"type": "output_text", "text": "yo"}
SAID = {"type": "message", "id": f"msg_{THEIRS}", "role": "assistant", "content": [PART]}
CALLED = {"type": "function_call", "call_id": "call_1", "name": "f", "arguments": "{}"}
CALLED |= {"id": f"fc_{THEIRS}"}
HI = {"type": "message", "role": "user", "content": "hi"}
MORE = {"type": "message", "role": "user", "content": "more"}


def cloud_answer(response_id: str = NATIVE, *output: dict[str, Any]) -> dict[str, Any]:
    return {"id": response_id, "status": "completed", "output": list(output or (THOUGHT, SAID))}


def kept(store: ResponseStore, key: str = "k", maker: str = "dep-a") -> ResponseStore:
    store.keep(key, {"input": "hi"}, cloud_answer(), maker)
    return store


def sent(store: ResponseStore, key: str = "k", to: str = "dep-a", **body: Any) -> dict[str, Any]:
    return store.for_cloud(key, {"input": [MORE]} | body, to).body


def refused(store: ResponseStore, key: str = "k", **body: Any) -> str:
    with pytest.raises(RequestError) as caught:
        sent(store, key, **body)
    assert caught.value.status == 404
    return caught.value.param or ""


def item_reference(item_id: str) -> dict[str, Any]:
    return {"type": "item_reference", "id": item_id}


def test_a_body_that_refers_to_nothing_is_the_same_for_the_cloud() -> None:
    body = {"input": [MORE], "model": "m"}
    found = ResponseStore().for_cloud("k", body, "dep-a")
    assert found.body == found.whole == body
    assert sent(ResponseStore(), input="hi") == {"input": [HI]}


@pytest.mark.parametrize("key", ["", "k"])
def test_the_maker_is_sent_its_own_items_as_they_came(key: str) -> None:
    store = kept(ResponseStore(), key)
    body = {"input": [MORE], "previous_response_id": NATIVE, "store": True}
    assert store.maker(key, body) == "dep-a"
    found = store.for_cloud(key, body, "dep-a")
    assert found.body == {"input": [HI, THOUGHT, SAID, MORE], "store": True}
    assert found.whole == body | {"input": [HI, THOUGHT, SAID, MORE]}
    assert found.whole == store.expand(key, body)  # a local model is given the same
    plain = {name: value for name, value in SAID.items() if name != "id"}
    other = sent(store, key, "dep-b", previous_response_id=NATIVE)  # which cannot read the rest
    assert other["input"] == [HI, plain, MORE]


def test_an_id_that_only_the_provider_knows_passes_where_there_is_one_key() -> None:
    asked = {"input": [MORE], "previous_response_id": NATIVE}
    found = ResponseStore().for_cloud("", asked, "dep-a")
    assert found.body == asked
    assert found.whole is None  # what came before is not known here, so nothing can be kept
    assert ResponseStore().maker("k", asked) == "dep-a"
    for previous in (OURS, BRIDGED, "resp_abc", f"resp_{THEIRS}{THEIRS[:16]}"):
        assert refused(ResponseStore(), previous_response_id=previous) == "previous_response_id"


def test_what_another_key_was_given_is_not_there() -> None:
    store = kept(ResponseStore())
    for previous in (NATIVE, OURS, BRIDGED):
        name = "previous_response_id"
        assert refused(store, "other", previous_response_id=previous) == name
    for item_id in (THOUGHT["id"], SAID["id"], "rs_unheard_of"):
        assert refused(store, "other", input=[item_reference(item_id)]) == "input[0].id"
    assert store.maker("other", {"previous_response_id": NATIVE}) == "dep-a"  # its own word
    assert store.maker("other", {"previous_response_id": BRIDGED}) == ""


def test_an_items_id_passes_only_for_the_key_that_was_given_it() -> None:
    """The provider would look it up among what all keys were given."""
    store = kept(ResponseStore())
    bare = {"type": "reasoning", "id": THOUGHT["id"], "summary": []}
    history = [bare, THOUGHT, SAID, CALLED, MORE]
    mine = sent(store, "k", input=history)["input"]
    plain = [{k: v for k, v in row.items() if k != "id"} for row in (THOUGHT, SAID, CALLED)]
    assert mine == [bare, THOUGHT, SAID, plain[2], MORE]
    assert sent(store, "other", input=history)["input"] == [*plain, MORE]
    assert sent(store, "", input=history)["input"] == history
    for odd in (7, [], {"a": 1}, True):  # which is no id
        assert sent(store, input=[MORE | {"id": odd}])["input"] == [MORE]


def test_references_to_a_clouds_items_are_the_items() -> None:
    store = kept(ResponseStore())
    given = [item_reference(THOUGHT["id"]), item_reference(SAID["id"]), MORE]
    assert sent(store, input=given)["input"] == [THOUGHT, SAID, MORE]
    assert store.expand("k", {"input": given})["input"] == [THOUGHT, SAID, MORE]
    unknown = item_reference("rs_unheard_of")
    found = store.for_cloud("", {"input": [unknown]}, "dep-a")
    assert (found.body["input"], found.whole) == ([unknown], None)
    assert refused(store, input=[item_reference(f"msg_{OUR_HEX}_0")]) == "input[0].id"


def test_items_are_forgotten_with_their_response() -> None:
    now_s = 0.0
    store = kept(ResponseStore(lambda: now_s))
    store.delete("k", NATIVE)
    assert refused(store, input=[item_reference(SAID["id"])]) == "input[0].id"
    kept(store)
    store.keep("k", {"input": "x"}, cloud_answer("resp_2"), "dep-a")  # the same items again
    store.delete("k", NATIVE)
    assert sent(store, input=[item_reference(SAID["id"])])["input"] == [SAID]
    now_s = AGE_S_MAX + 1
    assert refused(store, input=[item_reference(SAID["id"])]) == "input[0].id"


def test_what_a_cloud_sent_instead_of_a_response_is_not_kept() -> None:
    store = ResponseStore()
    for odd in (
        *({}, {"id": "resp_1"}, {"id": 7, "output": []}, {"id": "", "output": []}),
        *({"id": "r" * 2_000, "output": []}, {"id": "resp_1", "output": "x"}),
        {"id": "resp_1", "output": ["x"]},
        {"id": "resp_1", "output": [{}] * (response_store.OUTPUT_MAX + 1)},
    ):
        store.keep("k", {"input": "hi"}, odd, "dep-a")
    store.keep("k", {"input": "hi", "store": False}, cloud_answer(), "dep-a")
    assert len(store) == 0
    odd_items = cloud_answer("resp_1", {"type": "message", "id": 7}, {"type": "x"})
    store.keep("k", {"input": "hi"}, odd_items, "dep-a")
    assert len(store) == 1


def test_a_restart_loses_neither_maker_nor_items(tmp_path: Path) -> None:
    store = kept(ResponseStore(directory=tmp_path))
    store.keep("k", {"input": "hi"}, {"id": OURS, "output": [SAID]})
    store.close()
    again = ResponseStore(directory=tmp_path)
    try:
        assert again.maker("k", {"previous_response_id": NATIVE}) == "dep-a"
        assert again.maker("k", {"previous_response_id": OURS}) == ""
        assert sent(again, input=[item_reference(THOUGHT["id"])])["input"] == [THOUGHT]
    finally:
        again.close()
