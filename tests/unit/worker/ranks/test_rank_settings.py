"""A setting or a request that several ranks cannot serve is refused, and the reason says why."""

from types import SimpleNamespace
from typing import Any

import pytest

from hearth.shared.errors import StartError
from hearth.shared.settings_from_env import Settings, load_settings
from hearth.worker.kv.layer_adapters import LayerMap, UnknownCache
from hearth.worker.ranks.leading_layer_map import LeadingLayerMap, kinds_of
from hearth.worker.ranks.leading_rank import LeadingRank, refuse_device
from hearth.worker.ranks.named_kv import NamedCache, Telling
from hearth.worker.ranks.rank_link import Handle, RankRoom
from hearth.worker.ranks.start_ranks import refuse_settings
from hearth.worker.setup.draft_setup import draft_policy
from hearth.worker.setup.kv_setup import cache_root
from scripts.harness.socketless_worker import loaded, machine


def settings(**environ: str) -> Settings:
    return load_settings({"RANKS": "2", **environ}, None)


@pytest.mark.parametrize(
    ("name", "value"),
    [("KV_BITS", "8"), ("DRAFT_MODEL", "/m"), ("ADAPTERS", "one=/a")],
)
def test_a_setting_that_ranks_cannot_have_is_refused(name: str, value: str) -> None:
    with pytest.raises(StartError, match=f"RANKS is 2 and {name} is .* or set RANKS=1"):
        refuse_settings(settings(**{name: value}))
    refuse_settings(settings())


def test_ranks_on_cuda_are_refused_and_elsewhere_they_are_not() -> None:
    with pytest.raises(StartError, match=r"RANKS is 2, .* CUDA .* Set RANKS=1"):
        refuse_device(2, "cuda")
    refuse_device(2, "metal")
    refuse_device(2, "cpu")


def test_nothing_is_drafted_and_the_reason_names_ranks() -> None:
    engine: Any = None  # it is not asked
    policy = draft_policy(settings(), None, engine, is_exact=False, is_cpu=True)
    assert (policy.reach, policy.reach_max) == ("none", "none")
    assert "RANKS is 2" in policy.reason


def test_kv_of_other_ranks_or_splits_is_never_found() -> None:
    model = loaded("qwen3", tiny=True)
    environs = ({}, {"RANKS": "2"}, {"RANKS": "3"}, {"RANKS": "2", "RANK_SPLIT": "pipeline"})
    roots = {cache_root(model, load_settings(environ, None)) for environ in environs}
    assert len(roots) == len(environs)


def test_a_rank_that_cannot_load_its_part_is_named_with_its_reason() -> None:
    link: Any = Answers(["MODEL_PATH is too large for it.", {}, 0, 0, 0])
    rank = LeadingRank(link, SimpleNamespace(size=lambda: 2), "tensor")  # type: ignore[arg-type]
    with pytest.raises(StartError, match=r"Rank 1 \(there\) cannot load its part: MODEL_PATH is"):
        rank.joined(loaded("qwen3", tiny=True))


class Answers:
    """A link whose followers answer what they are given."""

    size, hosts = 2, ("here", "there")

    def __init__(self, *answers: Any) -> None:
        self._answers = list(answers)
        self.rooms: dict[int, RankRoom] = {}

    def ask(self, *_operation: Any, drops: Any = ()) -> list[Any]:
        return self._answers

    def tell(self, *_operation: Any, drops: Any = ()) -> None:
        pass


def probe(name: str) -> NamedCache:
    return NamedCache(machine(name, tiny=True).engine.probe(), Handle(1))


def mapped(name: str, answer: Any) -> LeadingLayerMap:
    link: Any = Answers(answer)
    return LeadingLayerMap(probe(name), Telling(link))


def test_ranks_that_keep_other_kinds_of_things_are_refused() -> None:
    with pytest.raises(StartError, match="Rank 0 has layers that keep rows of every token, and"):
        mapped("qwen3", ["", [1, 1, 0], 1])
    with pytest.raises(UnknownCache, match="Strange on rank 1"):
        mapped("qwen3", ["Strange", [], 0])


def test_the_greediest_rank_decides_how_much_a_byte_of_rank_0_weighs() -> None:
    layers = LayerMap(probe("qwen3"))
    own = layers.slot_bytes(1 << 15, None)
    assert mapped("qwen3", ["", kinds_of(layers), 3 * own]).byte_share == 3
    rank = LeadingRank(Answers(), SimpleNamespace(size=lambda: 2), "tensor")  # type: ignore[arg-type]
    rank.rooms = {1: RankRoom(1000, 400)}
    assert rank.limit(250) == 250 + 600
    rank.telling.link.rooms[1] = RankRoom(0, 0)  # type: ignore[index]
    assert rank.limit(250) == 250 + 600, "it has not looked yet"
    assert rank.limit(450) == 250 + 600, "the 200 bytes that rank 0 took since, it has taken too"
    rank.telling.link.rooms[1] = RankRoom(1000, 900)  # type: ignore[index]
    rank.byte_share = 2.0
    assert rank.limit(250) == 250 + 50
