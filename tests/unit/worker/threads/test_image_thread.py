"""The image thread: every message goes on with its pictures, or ends in exactly one Failed."""

import queue
from collections import Counter
from dataclasses import replace
from typing import Any, cast

import pytest

from hearth.shared.errors import RequestError
from hearth.shared.wire_messages import Count, Failed, Prompt, Sampling, Speaker, Submit, Up
from hearth.worker.cache.image_keys import PromptImage
from hearth.worker.prompt.images.image_processor import ImageReader
from hearth.worker.schedule.request_state import ClientLease, MessageWithImages
from hearth.worker.threads.prompt_thread import read_images


def picture(digest: str) -> PromptImage:
    return PromptImage(digest.encode(), (7,), (), dict)


class Reader:
    """Reads anything but what begins with "broken"; `cancels` is cancelled by the first image."""

    def __init__(self, cancels: ClientLease | None = None) -> None:
        self.read_digests: list[str] = []
        self.owners: list[str] = []
        self._cancels = cancels

    def read(self, digest: str, data: bytes, owner: str = "") -> PromptImage:
        self.read_digests.append(digest)
        self.owners.append(owner)
        if self._cancels is not None:
            self._cancels.is_cancelled = True
        if data.startswith(b"broken"):
            raise RequestError("The image cannot be read.", code="image_broken")
        if data == b"bug":
            raise ZeroDivisionError
        return picture(digest)


def shows(*digests: str) -> dict[str, Any]:
    parts: list[Any] = [{"type": "text", "text": "see"}]
    parts += [{"type": "image", "image": digest} for digest in digests]
    return {"role": "user", "content": parts}


def prompt(*messages: dict[str, Any], **files: bytes) -> Prompt:
    digests = {part["image"] for m in messages for part in m["content"] if "image" in part}
    images = {d: files.get(d, b"fine") for d in sorted(digests)}
    return Prompt(list(messages), images=images, places={d: f"input[3].{d}" for d in digests})


def run(
    reader: Reader, *jobs: tuple[ClientLease, Submit | Count]
) -> tuple[list[tuple[str, dict[str, PromptImage]]], list[Up]]:
    """Return what went on to the prompt thread, and what was sent."""
    jobs_in: queue.SimpleQueue[tuple[ClientLease, Submit | Count] | None] = queue.SimpleQueue()
    for job in (*jobs, None):
        jobs_in.put(job)
    went_on: list[tuple[str, dict[str, PromptImage]]] = []
    sent: list[Up] = []

    def put(job: tuple[ClientLease, MessageWithImages]) -> None:
        lease, seen = job
        assert lease.request_id == seen.message.request_id
        went_on.append((seen.message.request_id, dict(seen.images)))

    read_images(cast(ImageReader, reader), jobs_in, put, sent.append)
    return went_on, sent


def submit(name: str, asked: Prompt) -> tuple[ClientLease, Submit]:
    return ClientLease(name, b"peer"), Submit(name, asked, Sampling())


def count(name: str, asked: Prompt) -> tuple[ClientLease, Count]:
    return ClientLease(name, b"peer"), Count(name, asked)


def test_a_message_goes_on_with_every_picture_in_order() -> None:
    reader = Reader()
    text = {"role": "assistant", "content": "I see"}
    first = submit("one", prompt(shows("a", "b"), shows("c")))
    second = count("two", prompt(shows("a")))
    first[1].prompt.messages.insert(1, text)
    went_on, sent = run(reader, first, second)
    assert [(name, sorted(pictures)) for name, pictures in went_on] == [
        ("one", ["a", "b", "c"]),
        ("two", ["a"]),
    ]
    assert went_on[0][1]["b"].identity == b"b"
    assert sent == []


def test_an_image_that_is_shown_twice_is_read_once() -> None:
    reader = Reader()
    run(reader, submit("one", prompt(shows("a", "a"), shows("b", "a"))))
    assert Counter(reader.read_digests) == {"a": 1, "b": 1}


@pytest.mark.parametrize("asks", [submit, count])
def test_a_refused_image_is_named_as_by_its_client_and_ends_its_request_alone(asks: Any) -> None:
    tool = {**shows("fine", "bad"), "role": "tool"}
    bad = asks("bad", prompt(shows("fine"), tool, bad=b"broken"))
    alone = asks("alone", prompt(shows("bad"), bad=b"broken"))
    went_on, sent = run(Reader(), bad, alone, submit("good", prompt(shows("a"))))
    assert sent == [
        Failed("bad", 400, "image_broken", "input[3].bad: The image cannot be read."),
        Failed("alone", 400, "image_broken", "input[3].bad: The image cannot be read."),
    ]
    assert [name for name, _ in went_on] == ["good"]


def test_nothing_is_read_for_a_client_that_is_gone() -> None:
    reader = Reader()
    job = submit("one", prompt(shows("a")))
    job[0].is_cancelled = True
    went_on, sent = run(reader, job)
    assert (went_on, reader.read_digests) == ([], [])
    assert sent == [Failed("one", 499, "client_closed", "The client is gone.")]


def test_a_client_that_goes_between_two_images_ends_it_there() -> None:
    job = submit("one", prompt(shows("a", "b")))
    reader = Reader(cancels=job[0])
    went_on, sent = run(reader, job)
    assert (went_on, reader.read_digests) == ([], ["a"])
    assert [cast(Failed, message).status for message in sent] == [499]


def test_a_bug_is_not_taken_for_a_bad_image() -> None:
    with pytest.raises(ZeroDivisionError):
        run(Reader(), submit("one", prompt(shows("a"), a=b"bug")))


def test_what_is_remembered_of_an_image_is_its_keys_own_where_keys_are_kept_apart() -> None:
    everybodys = prompt(shows("a"))
    asked = replace(everybodys, speaker=Speaker(key="k"))
    lease, message = submit("one", everybodys)
    jobs: list[tuple[ClientLease, Submit | Count]] = [
        (lease, message),
        (lease, replace(message, prompt=asked)),
        (lease, Count("one", asked)),
        (lease, replace(message, use_kv_cache=False)),
        (lease, replace(message, prompt=asked, use_kv_cache=False)),
    ]
    reader = Reader()
    run(reader, *jobs)
    assert reader.owners == ["", "k", "k", "one", "kone"]
