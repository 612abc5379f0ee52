"""The scheduler with a scripted engine: no MLX forward, no sockets."""

from collections import Counter

import pytest
from hypothesis import given, strategies as st

from hearth.shared.wire_messages import Delta, Finished, Progress
from tests.helpers.worker.scripted_scheduler import finish_of, request, run, scheduler, text_of


def test_a_request_is_admitted_prefilled_decoded_and_finished() -> None:
    made, engine = scheduler(x=[8, 9])
    assert made.submit(request("x", prompt=25)) == Progress("x", 0, 25)
    events = run(made)
    assert [type(e).__name__ for e in events[:4]] == ["Progress"] * 3 + ["Delta"]
    assert engine.decoder.log[:4] == ["chunk 10", "chunk 10", "chunk 4", "add x"]
    assert text_of(events, "x") == "hi"
    usage = finish_of(events, "x").usage
    assert (usage.prompt_tokens, usage.prefilled_tokens, usage.completion_tokens) == (25, 25, 3)
    assert finish_of(events, "x").reason == "stop"


def test_a_prompt_of_one_token_needs_no_chunk() -> None:
    made, engine = scheduler(x=[8])
    made.submit(request("x", prompt=1))
    assert text_of(run(made), "x") == "h"
    assert engine.decoder.log[0] == "add x"


def test_decoding_goes_on_between_the_chunks_of_a_newcomer() -> None:
    made, engine = scheduler(old=[1] * 50)
    made.submit(request("old"))
    list(made.step())
    made.submit(request("new", prompt=100))
    for _ in range(8):
        list(made.step())
    log = engine.decoder.log[3:]
    assert log == ["chunk 10", "step"] * 8


def test_a_short_prompt_overtakes_a_long_prefill_but_does_not_stop_it() -> None:
    made, engine = scheduler(long=[1], short=[2])
    made.submit(request("long", prompt=600))
    list(made.step())
    made.submit(request("short", prompt=8))
    events = run(made)
    order = [e.request_id for e in events if isinstance(e, Finished)]
    assert order == ["short", "long"]
    assert engine.decoder.log.index("add short") < 8


def test_a_stream_of_short_prompts_cannot_starve_a_long_one() -> None:
    made, engine = scheduler()
    made.submit(request("long", prompt=200))
    for number in range(100):
        made.submit(request(f"s{number}", prompt=8))
        list(made.step())
    assert "add long" in engine.decoder.log


@pytest.mark.parametrize("steps", [0, 1, 3, 12])
def test_a_client_that_leaves_ends_its_request_within_one_step(steps: int) -> None:
    made, engine = scheduler(x=[1] * 1000)
    leaving = request("x", prompt=100)
    made.submit(leaving)
    for _ in range(steps):
        list(made.step())
    leaving.lease.is_cancelled = True
    events = list(made.step())
    assert finish_of(events, "x").reason == "cancelled"
    assert made.is_idle and not engine.decoder.sequences
    assert leaving.slot is None


@pytest.mark.parametrize(
    ("tokens_max", "text", "reason", "stop", "tokens"),
    [(3, "abc", "length", None, 3), (99, "ab", "stop", "cd", 4)],
    ids=["its limit, which shows what was held back", "a stop string, which is named"],
)
def test_an_answer_ends_at_its_limit_or_before_a_stop_string(
    tokens_max: int, text: str, reason: str, stop: str | None, tokens: int
) -> None:
    made, _ = scheduler(x=[1, 2, 3, 4, 5])
    made.submit(request("x", tokens_max=tokens_max, stop="cd"))
    events = run(made)
    assert text_of(events, "x") == text
    finished = finish_of(events, "x")
    assert (finished.reason, finished.stop_sequence) == (reason, stop)
    assert finished.usage.completion_tokens == tokens


@given(
    st.lists(
        st.tuples(st.integers(1, 60), st.integers(1, 8), st.integers(0, 8), st.integers(0, 30)),
        max_size=8,
    )
)
def test_every_request_ends_in_exactly_one_finished(
    arrivals: list[tuple[int, int, int, int]],
) -> None:
    made, engine = scheduler(slots=3, **{f"r{i}": [1] * a[2] for i, a in enumerate(arrivals)})
    events = []
    requests = {}
    for number, (prompt, tokens_max, _, steps) in enumerate(arrivals):
        requests[f"r{number}"] = request(f"r{number}", prompt, tokens_max)
        made.submit(requests[f"r{number}"])
        for _ in range(steps % 4):
            events += made.step()
        if steps % 5 == 0:
            requests[f"r{number}"].lease.is_cancelled = True
    events += run(made)
    ends = Counter(e.request_id for e in events if isinstance(e, Finished))
    assert ends == Counter(requests.keys())
    assert not engine.decoder.sequences
    for name in requests:
        mine = [e for e in events if getattr(e, "request_id", "") == name]
        assert isinstance(mine[-1], Finished)
        assert [e.seq for e in mine if isinstance(e, Delta)] == list(
            range(sum(isinstance(e, Delta) for e in mine))
        )
        done = [e.done_tokens for e in mine if isinstance(e, Progress)]
        assert done == sorted(set(done))


def test_a_follower_takes_over_when_its_leader_is_cancelled() -> None:
    made, _ = scheduler(slots=3)
    leader = request("leader", prompt=200, text="same")
    made.submit(leader)
    made.submit(request("follower", prompt=200, text="same"))
    list(made.step())
    assert made.waiting == 1
    leader.lease.is_cancelled = True
    events = list(made.step())
    assert finish_of(events, "leader").reason == "cancelled"
    assert (made.running, made.waiting) == (1, 0)


def test_only_what_both_prefill_alike_is_waited_for() -> None:
    made, _ = scheduler(slots=3)
    made.submit(request("leader", prompt=101, text="same"))
    made.submit(request("follower", prompt=31, text="same"))
    steps = 0
    while made.waiting:
        list(made.step())
        steps += 1
    assert steps == 4, "three shared chunks of 10 tokens, and a slot at the fourth step"


def test_the_queue_is_told_in_the_order_in_which_it_is_served() -> None:
    made, _ = scheduler(slots=1)
    for name in ("a1", "a2", "a3", "b1", "c1", "b2"):
        made.submit(request(name, asker=name[0]))
    load = made.load(arriving=0)
    assert (load.running, load.queue) == (0, ["a1", "b1", "c1", "a2", "b2", "a3"])
    ends = [e.request_id for e in run(made) if isinstance(e, Finished)]
    assert ends == load.queue


def test_the_wait_behind_a_shared_prompt_counts_that_prompt_once() -> None:
    """Nothing was measured, so that a prompt of 10,000 takes 40 s and an answer 10 s."""
    made, apart = scheduler(slots=4)[0], scheduler(slots=4)[0]
    for number in range(4):
        made.submit(request(f"r{number}", prompt=10_001, text="same"))
        apart.submit(request(f"r{number}", prompt=10_001))
    assert not list(made.give_slots())
    assert not list(apart.give_slots())
    assert (made.running, made.waiting) == (1, 3), "who waits for a prompt has no slot"
    assert (apart.running, apart.waiting) == (4, 0)
    assert made.load(arriving=1).wait_s == pytest.approx(50)
    assert apart.load(arriving=1).wait_s == pytest.approx(90)
