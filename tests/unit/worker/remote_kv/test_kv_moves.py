"""Files of kept KV go from one worker to another, and nothing that lies is taken."""

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from hearth.shared.kv_move_messages import CHUNK_BYTES, Chunk, Fetch, Found, KVMove, Seek
from hearth.worker.cache.block_hash import PrefixHash, root_hash
from hearth.worker.cache.extent_store import Layout
from hearth.worker.disk.file_names import FileKind
from hearth.worker.disk.resume_files import resume_files
from hearth.worker.remote_kv import kv_receiver, transfer_speed
from hearth.worker.remote_kv.moved_files import MovedFile
from hearth.worker.remote_kv.transfer_speed import ENOUGH_S, TransferSpeed
from tests.helpers.remote_kv.kv_movers import (
    FULL,
    PLAIN,
    RUN,
    Client,
    Machine,
    Network,
    garbled,
    prompt_of,
    records_of,
)

M3, M4 = root_hash(["chip M3"]), root_hash(["chip M4"])
TOKENS = list(range(1, 5 * RUN + 20))
LONGER = [*TOKENS, *range(9000, 9000 + RUN)]

Join = Callable[..., Network]


@pytest.fixture
def join(tmp_path: Path) -> Iterator[Join]:
    made: list[Network] = []

    def make(other_root: PrefixHash = M4, is_exact: bool = False, layout: Layout = FULL) -> Network:
        machines = [
            Machine(number, tmp_path / f"{len(made)}.{number}", root, layout, is_exact)
            for number, root in ((0, M3), (1, other_root))
        ]
        made.append(Network(*machines))
        return made[-1]

    yield make
    for network in made:
        network.close()


def kept(network: Network, layout: Layout = FULL) -> None:
    """Have the first machine keep the prompt."""
    query = prompt_of(TOKENS, M3)
    network.one.keep(query, records_of(query, M3, layout))


def resumable(machine: Machine, tokens: list[int], end: int) -> bool:
    """Whether all is on disk to go on from a prompt's position `end`."""
    query = prompt_of(tokens, machine.root)
    assert query.root is not None
    name = query.names[query.cuts.index(end)]
    return bool(resume_files(machine.store, machine.layout, query.root, name))


def test_a_longer_prompt_goes_on_from_what_another_machine_kept_of_its_beginning(
    join: Join,
) -> None:
    network = join()
    kept(network)
    network.two.get(prompt_of(LONGER, M4))
    assert resumable(network.two, LONGER, 5 * RUN)
    counts = network.two.receiver.counts
    assert (counts["moved"], counts["moved_tokens"]) == (1, 5 * RUN)
    sent = network.one.sender.counts["sent_bytes"]
    assert sent == counts["bytes"] == network.relay.counts["bytes"] > 5 * RUN * 64


def test_what_another_chip_made_is_fast_and_what_the_same_one_made_stays_canonical(
    join: Join,
) -> None:
    other, same = join(), join(M3)
    for network in (other, same):
        kept(network)
    other.two.get(prompt_of(TOKENS, M4))
    same.two.get(prompt_of(TOKENS, M3))
    assert {name.split("-")[1] for name in other.two.files()} == {"fast"}
    assert same.two.files() < same.one.files(), "all but windows further back than any resume looks"


def test_where_only_exact_kv_is_reused_nothing_comes_from_another_chip(join: Join) -> None:
    network = join(is_exact=True)
    kept(network)
    network.two.get(prompt_of(TOKENS, M4))
    assert network.two.files() == set()
    assert network.two.receiver.counts["refused_exact"] == 1
    assert not network.one.sender.counts["sent_bytes"]


def test_another_key_finds_nothing_of_the_same_prompt(join: Join) -> None:
    network = join()
    kept(network)
    network.two.get(prompt_of(TOKENS, M4, key="theirs"))
    assert network.two.files() == set()
    assert network.two.receiver.counts == {"sought": 1, "nowhere": 1}
    assert not network.one.sender.counts, "its worker was not even asked"


def test_what_is_there_already_is_not_sent_again(join: Join) -> None:
    network = join(layout=PLAIN)
    kept(network, PLAIN)
    own = prompt_of(TOKENS, M4)
    for record in records_of(own, M4, PLAIN)[:2]:
        network.two.store.put(record)
    network.two.get(own, kept=3 * RUN)
    rows = {name for name in network.two.files() if "fast" in name}
    assert len(rows) == 2, "two runs were on disk, one in memory"


def test_a_prompt_that_nobody_has_does_not_wait_for_what_is_being_written(join: Join) -> None:
    network, is_written = join(), threading.Event()
    network.two.disk.later(lambda: is_written.wait(60))
    _, done = network.two.ask(prompt_of(TOKENS, M4))
    assert done.wait(10) and network.two.receiver.counts["nowhere"] == 1
    is_written.set()


def test_a_short_rest_is_not_asked_for(join: Join) -> None:
    network = join()
    kept(network)
    move, _ = network.two.ask(prompt_of(TOKENS, M4), kept=5 * RUN - 10)
    assert move is None and not network.two.receiver.counts


def test_a_line_that_is_slower_than_reading_anew_is_left_after_a_few_pieces(join: Join) -> None:
    network = join()
    kept(network)

    def late(message: KVMove) -> KVMove:
        if isinstance(message, Chunk):
            time.sleep(0.1)
        return message

    network.one.on_sent = late
    fast = 5 * RUN / 0.7  # tokens a second: eleven files come in 1.1 s, the prompt is read in 0.7
    network.two.get(prompt_of(TOKENS, M4), speed=fast)
    assert network.two.receiver.counts["slow"] == 1
    assert len(network.two.files()) < 6
    network.one.on_sent = lambda message: message
    network.two.get(prompt_of(TOKENS, M4), speed=3 * fast)
    assert network.two.receiver.counts["slow"] == 2, "it is known now"


def bytes_asked(network: Network) -> list[int]:
    """Have how much the second machine asks for at once noted."""
    asked: list[int] = []

    def note(message: KVMove) -> KVMove:
        if isinstance(message, Fetch):
            asked.append(message.nbytes)
        return message

    network.two.on_sent = note
    return asked


def test_pieces_grow_on_a_fast_line_and_stay_small_on_a_slow_one(
    join: Join, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_receiver, "PIECE_BYTES_MIN", 1000)
    monkeypatch.setattr(kv_receiver, "CHUNK_BYTES", 4000)
    fast, slow = join(layout=PLAIN), join(layout=PLAIN)
    for network in (fast, slow):
        kept(network, PLAIN)
    monkeypatch.setattr(kv_receiver, "PIECE_S", 60.0)
    asked = bytes_asked(fast)
    fast.two.get(prompt_of(TOKENS, M4))
    assert asked[:4] == [1000, 2000, 4000, 4000] and fast.two.receiver.counts["moved"] == 1
    monkeypatch.setattr(kv_receiver, "PIECE_S", 0.0)
    asked = bytes_asked(slow)
    slow.two.get(prompt_of(TOKENS, M4))
    assert {*asked} == {1000} and slow.two.receiver.counts["moved"] == 1


def test_a_line_is_called_slow_for_what_it_takes_and_not_for_one_small_piece() -> None:
    speed = TransferSpeed()
    speed.note(1, 1000, ENOUGH_S / 2)
    assert speed.bytes_per_s(1) is None and speed.report() == {}
    speed.note(1, 1000, ENOUGH_S)
    assert speed.bytes_per_s(1) == pytest.approx(1800 / (1.4 * ENOUGH_S))
    for _ in range(7):
        speed.note(2, 1000, 0.001)
        assert speed.bytes_per_s(2) is None
    speed.note(2, 1000, 0.001)
    assert speed.bytes_per_s(2) == pytest.approx(1e6)


def test_a_line_that_was_slow_is_tried_again_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(transfer_speed, "awake_s", lambda: now[0])
    speed = TransferSpeed()
    speed.note(1, 1000, 10.0)
    assert speed.bytes_per_s(1) == 100
    now[0] += transfer_speed.STALE_S + 1
    assert speed.bytes_per_s(1) is None
    speed.note(1, 10**6, 1.0)
    assert speed.bytes_per_s(1) == 10**6, "what it was then counts no more"


def test_what_would_become_late_is_left_as_soon_as_that_is_seen(join: Join) -> None:
    network = join()
    kept(network)
    move, done = network.two.ask(prompt_of(TOKENS, M4), speed=5 * RUN / 10)
    assert move is not None and done.wait(60)
    move.files, move.received = [replace(network_file(), nbytes=1000)], 0
    assert not move.is_slow(1000 / 9) and move.is_slow(1000 / 11)
    move.asked_at -= 5
    assert not move.is_slow(1000 / 4) and move.is_slow(1000 / 6)


def network_file() -> MovedFile:
    name = records_of(prompt_of(TOKENS, M4), M4, PLAIN)[0].name
    return MovedFile(0, name, name, 0, 1)


def test_prompts_that_begin_alike_wait_for_one_move_and_not_for_one_each(join: Join) -> None:
    network, may_go = join(), threading.Event()
    kept(network)
    network.one.disk.later(lambda: may_go.wait(60))
    first, done = network.two.ask(prompt_of(TOKENS, M4))
    second, _ = network.two.ask(prompt_of(LONGER, M4))
    other, _ = network.two.ask(prompt_of([*TOKENS[: 2 * RUN], *([5] * 4 * RUN)], M4))
    assert first is not None and second is not None and other is not None
    assert (second.leader, other.leader) == (first, None), "most of the last one is its own"
    assert not second.is_late and second.prefill_s == 5 * RUN
    may_go.set()
    assert done.wait(60) and second.is_late and resumable(network.two, LONGER, 5 * RUN)
    counts = network.two.receiver.counts
    assert (counts["sought"], counts["joined"], counts["moved"]) == (2, 1, 1)


def test_who_waits_for_a_move_waits_no_longer_than_for_its_own(join: Join) -> None:
    network = join()
    kept(network)
    network.one.on_sent = lambda message: None
    first, _ = network.two.ask(prompt_of(TOKENS, M4))
    second, _ = network.two.ask(prompt_of(LONGER, M4))
    assert first is not None and second is not None and second.leader is first
    first.heard_at -= 10
    assert second.is_late, "the holder is silent"
    first.heard_at += 10
    second.asked_at -= second.prefill_s
    assert second.is_late and not first.is_late


@pytest.mark.parametrize("lacks", ["disk", "memory"])
def test_nothing_is_sent_of_what_could_not_be_written_or_read_then(join: Join, lacks: str) -> None:
    network = join(layout=PLAIN)
    kept(network, PLAIN)
    if lacks == "disk":
        network.two.store.bytes_max = 5 * RUN * 64 - 1
    else:
        network.two.fits = lambda rows: sum(tokens for tokens, _ in rows) < 5 * RUN
    for _ in range(kv_receiver.DISTRUST_AFTER + 1):
        network.two.get(prompt_of(TOKENS, M4))
    expected = {"sought": 4, "refused_room": 4}
    assert network.two.receiver.counts == expected, "the holder has not lied"
    assert not network.one.sender.counts["sent_bytes"]


@pytest.mark.parametrize("lie", ["bit", "tokens", "root", "longer", "place", "other", "early"])
def test_nothing_is_kept_of_what_is_not_what_was_asked_for(join: Join, lie: str) -> None:
    network = join(layout=PLAIN)
    kept(network, PLAIN)
    foreign = prompt_of([7] * len(TOKENS), M3)
    network.one.keep(foreign, records_of(foreign, M3, PLAIN))

    def lied(message: KVMove) -> KVMove:
        if lie == "bit":
            return garbled(message)
        if isinstance(message, Chunk):
            if lie == "longer":
                return replace(message, data=message.data + b"\0")
            return replace(message, offset=1) if lie == "place" else message
        if not isinstance(message, Found):
            return message
        if lie == "early":
            return Chunk(message.seek_id, 0, 0, b"\0")
        if lie == "other":
            return replace(message, name=b"\0" * 16)
        if lie == "root":
            return replace(message, root=M4)
        if lie == "tokens":
            assert foreign.root is not None
            files = resume_files(network.one.store, PLAIN, foreign.root, foreign.names[-1])
            return replace(message, files=[file.file_name for file in files])
        return message

    network.one.on_sent = lied
    network.two.get(prompt_of(TOKENS, M4))
    assert network.two.files() == set()
    counts = network.two.receiver.counts
    ends = [name for name in counts if name.startswith("refused_") or name in ("nowhere", "lost")]
    assert len(ends) == 1, counts


def test_a_worker_that_has_lied_three_times_is_not_listened_to_any_more(join: Join) -> None:
    network = join()
    kept(network)
    network.one.on_sent = garbled
    for _ in range(kv_receiver.DISTRUST_AFTER):
        network.two.get(prompt_of(TOKENS, M4))
    received = network.two.receiver.counts["bytes"]
    network.one.on_sent = lambda message: message
    network.two.get(prompt_of(TOKENS, M4))
    assert network.two.receiver.counts["distrusted"] == 1
    assert network.two.receiver.counts["bytes"] == received and network.two.files() == set()


def test_a_holder_that_is_gone_ends_the_move_at_once(join: Join) -> None:
    network = join()
    kept(network)

    def dies(message: KVMove) -> KVMove | None:
        if not isinstance(message, Chunk):
            return message
        network.relay.forget(0)
        return None

    network.one.on_sent = dies
    network.two.get(prompt_of(TOKENS, M4))
    assert network.two.receiver.counts["lost"] == 1


def test_a_holder_that_is_silent_makes_the_move_late(
    join: Join, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_receiver, "SILENCE_S_MAX", 0.05)
    network = join()
    kept(network)
    network.one.on_sent = lambda message: None
    move, done = network.two.ask(prompt_of(TOKENS, M4))
    assert move is not None and not move.is_late
    time.sleep(0.1)
    assert move.is_late and not done.is_set()
    network.two.receiver.give_up(move)
    assert network.two.receiver.counts["given_up"] == 1


def test_a_file_that_goes_amid_a_move_ends_it(join: Join) -> None:
    network = join()
    kept(network)

    def sweeps(message: KVMove) -> KVMove:
        if isinstance(message, Found):
            for path in (
                network.one.store.path_of(file.name)
                for file in records_of(prompt_of(TOKENS, M3), M3, FULL)
            ):
                path.unlink()
        return message

    network.one.on_sent = sweeps
    network.two.get(prompt_of(TOKENS, M4))
    assert network.two.receiver.counts["lost"] == 1 and network.two.files() == set()


def test_after_a_clear_nothing_of_a_move_is_kept(join: Join) -> None:
    network = join()
    kept(network)

    def clears(message: KVMove) -> KVMove:
        if isinstance(message, Fetch):
            network.two.receiver.forget()
        return message

    network.two.on_sent = clears
    move, _ = network.two.ask(prompt_of(TOKENS, M4))
    assert move is not None
    while not move.is_over:
        time.sleep(0.01)
    network.two.disk.later(lambda: None)
    network.two.disk.close()
    assert network.two.files() == set() and move.is_late


def test_the_move_of_a_client_that_left_fetches_nothing_more(join: Join) -> None:
    network = join()
    kept(network)
    client = Client()

    def leaves(message: KVMove) -> KVMove:
        client.is_gone = True
        return message

    network.one.on_sent = leaves
    _, done = network.two.ask(prompt_of(TOKENS, M4), client=client)
    assert done.wait(60) and network.two.receiver.counts["bytes"] == 0


def test_moves_that_nobody_ends_keep_no_place_from_others(join: Join) -> None:
    network = join()
    network.two.on_sent = lambda message: None  # its proxy is dead
    client = Client()
    prompts = [[7000 + number, *TOKENS] for number in range(2)]
    others = [[number + 1, *TOKENS] for number in range(kv_receiver.MOVES_MAX)]
    asked = [network.two.ask(prompt_of(tokens, M4), client=client)[0] for tokens in others]
    assert all(asked) and network.two.ask(prompt_of(prompts[0], M4))[0] is None
    client.is_gone = True
    last, _ = network.two.ask(prompt_of(prompts[0], M4))
    assert last is not None
    last.heard_at -= 10
    assert network.two.ask(prompt_of(prompts[1], M4))[0] is not None and last.is_over
    assert network.two.receiver.counts["given_up"] == kv_receiver.MOVES_MAX + 1


def test_only_files_of_an_offer_are_sent(join: Join) -> None:
    network = join()
    kept(network)
    sent: list[KVMove] = []
    network.one.on_sent = lambda message: sent.append(message)  # type: ignore[func-returns-value]
    query = prompt_of(TOKENS, M3)
    name = network.one.held.all().added[-1]
    for message in (
        Fetch("never offered", 0, 0, CHUNK_BYTES),
        Seek("a", [b"unknown", name]),
        Fetch("a", 99, 0, CHUNK_BYTES),
        Fetch("a", -1, 0, CHUNK_BYTES),
        Fetch("a", 0, 1 << 62, CHUNK_BYTES),
        Fetch("a", 0, -5, CHUNK_BYTES),
        Fetch("a", 0, 0, -1),
        Fetch("a", 0, 0, CHUNK_BYTES),
    ):
        network.one.sender.hear(b"proxy", message)
    network.one.sender.hear(b"another proxy", Fetch("a", 0, 0, CHUNK_BYTES))
    while len(sent) < 9:
        time.sleep(0.01)
    chunks = [len(message.data) for message in sent if isinstance(message, Chunk)]
    assert chunks[:6] == [0] * 6 and chunks[6] > RUN and chunks[7] == 0
    assert query.limit == 5 * RUN


def test_what_lacks_its_state_is_passed_over_without_a_look_at_all_that_leads_there(
    join: Join, monkeypatch: pytest.MonkeyPatch
) -> None:
    network = join()
    query = prompt_of(TOKENS, M3)
    rows = [r for r in records_of(query, M3, FULL) if r.kind is not FileKind.STATE]
    network.one.keep(query, rows)
    looks: list[PrefixHash] = []
    at = network.one.store.at
    monkeypatch.setattr(network.one.store, "at", lambda end: [looks.append(end), *at(end)][1:])
    assert query.root is not None
    assert resume_files(network.one.store, FULL, query.root, query.names[-1]) == []
    assert {*looks} == {query.names[-1]}


def test_a_state_that_is_not_on_disk_is_not_offered_and_the_prefix_before_it_is(
    join: Join,
) -> None:
    network = join()
    short = prompt_of(TOKENS[: 3 * RUN + 20], M3)
    network.one.keep(short, records_of(short, M3, FULL))
    whole = prompt_of(TOKENS, M3)
    rows = [r for r in records_of(whole, M3, FULL) if r.kind is not FileKind.STATE]
    network.one.keep(whole, rows)
    network.two.get(prompt_of(TOKENS, M4))
    assert resumable(network.two, TOKENS, 3 * RUN)
    assert network.two.receiver.counts["moved_tokens"] == 3 * RUN
