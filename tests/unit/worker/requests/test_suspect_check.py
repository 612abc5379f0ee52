"""Prompts that a worker died with are found by their tokens, for their API key alone."""

import time
from pathlib import Path

import numpy as np
import pytest

from hearth.shared.errors import RequestError
from hearth.shared.suspects.suspect_store import SuspectStore, Suspicion
from hearth.worker.cache.block_hash import PrefixHash, Tokens, key_root, pack, prefix_hashes
from hearth.worker.requests.suspect_check import SuspectCheck
from hearth.worker.schedule.suspects.running_forwards import answer_name, idle_name, owner_name

ROOT = PrefixHash(b"root")
TOKENS = pack(range(1000))


def died(
    store: SuspectStore,
    tokens: Tokens,
    root: PrefixHash = ROOT,
    kind: str = "prefill",
    **more: object,
) -> Suspicion:
    """Note a death while `tokens` were read, or behind them answered."""
    (name,) = prefix_hashes(root, tokens, [len(tokens)])
    known = {"decode": answer_name, "idle": idle_name}.get(kind, lambda s, n: s.named(n))(
        store, name
    )
    fields = {"owner": "", "deaths": 1, "is_refused": False} | more
    row = Suspicion(
        name=known.hex(),
        kind=kind,
        length=len(tokens),
        tokens=len(tokens),
        lone_deaths=0,
        died_at=time.time(),
        how="SIGSEGV",
        **fields,  # type: ignore[arg-type]
    )
    store.save(row)
    return row


@pytest.fixture
def store(tmp_path: Path) -> SuspectStore:
    return SuspectStore(tmp_path / "suspects")


def test_every_longer_prompt_is_suspected_and_no_other(store: SuspectStore) -> None:
    row = died(store, TOKENS[:256])
    check = SuspectCheck(store)
    assert check.suspicions(ROOT, TOKENS) == (row,) == check.suspicions(ROOT, TOKENS[:256])
    assert check.suspicions(ROOT, TOKENS[:255]) == ()
    other = TOKENS.copy()
    other[255] += 1
    assert check.suspicions(ROOT, other) == ()


def test_an_answer_is_suspected_for_the_same_prompt_alone(store: SuspectStore) -> None:
    """The agent's next turn reads other tokens there."""
    row = died(store, TOKENS[:256], kind="decode")
    check = SuspectCheck(store)
    assert check.suspicions(ROOT, TOKENS[:256]) == (row,)
    assert check.suspicions(ROOT, TOKENS) == ()


def test_idle_work_makes_no_request_a_suspect(store: SuspectStore) -> None:
    died(store, TOKENS[:256], kind="idle")
    assert SuspectCheck(store).suspicions(ROOT, TOKENS[:256]) == ()


def test_another_keys_same_prompt_is_none(store: SuspectStore) -> None:
    """Else a refusal would tell B what A has sent."""
    row = died(store, TOKENS[:256], key_root(ROOT, "A"), is_refused=True)
    check = SuspectCheck(store)
    with pytest.raises(RequestError):
        check.suspicions(key_root(ROOT, "A"), TOKENS)
    assert check.suspicions(key_root(ROOT, "B"), TOKENS) == ()
    assert row.is_refused and check.refusals == 1


def test_a_prompt_of_another_model_or_mlx_is_none(store: SuspectStore) -> None:
    died(store, TOKENS[:256], is_refused=True)
    assert SuspectCheck(store).suspicions(PrefixHash(b"upgraded"), TOKENS) == ()


def test_the_second_death_is_a_400_that_says_it_all(store: SuspectStore) -> None:
    died(store, TOKENS[:10])
    died(store, TOKENS[:256], is_refused=True, deaths=2)
    with pytest.raises(RequestError) as caught:
        SuspectCheck(store).suspicions(ROOT, TOKENS)
    assert (caught.value.status, caught.value.code) == (400, "prompt_refused")
    for part in ("2 times", "SIGSEGV", "first 256 tokens", "upgraded", "PREFILL_CHUNK"):
        assert part in str(caught.value)


def test_each_key_is_told_its_own_and_clears_its_own(store: SuspectStore) -> None:
    for key in "AB":
        owner = owner_name(store, key).hex()
        died(store, TOKENS[:256], key_root(ROOT, key), owner=owner, is_refused=key == "B")
    check = SuspectCheck(store)
    assert len(check.report()["rows"]) == 2
    report = check.report("A")
    assert (report["suspects"], report["refused"]) == (1, 1), "sums are over all keys"
    assert [row["refused"] for row in report["rows"]] == [False]
    check.clear("B")
    assert [row["refused"] for row in check.report()["rows"]] == [False]
    check.clear()
    assert check.report()["rows"] == []


def test_without_a_store_nobody_is_suspected() -> None:
    check = SuspectCheck()
    assert check.suspicions(ROOT, TOKENS) == () and check.report()["suspects"] == 0
    check.clear()


def test_a_long_prompt_is_hashed_once_for_all_suspicions(
    store: SuspectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    for length in range(100, 900, 100):
        died(store, TOKENS[:length])
    hashed = []

    def counted(root: PrefixHash, tokens: Tokens, ends: list[int]) -> list[PrefixHash]:
        hashed.append(len(ends))
        return prefix_hashes(root, tokens, ends)

    monkeypatch.setattr("hearth.worker.requests.suspect_check.prefix_hashes", counted)
    assert len(SuspectCheck(store).suspicions(ROOT, np.asarray(TOKENS))) == 8
    assert hashed == [8]
