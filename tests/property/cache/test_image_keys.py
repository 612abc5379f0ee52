"""Keys name what images show, and cuts keep clear of them."""

from dataclasses import dataclass

import numpy as np
from hypothesis import given, strategies as st

from hearth.worker.cache.block_hash import common_length, prefix_hashes, root_hash
from hearth.worker.cache.image_keys import (
    ImageRun,
    PromptImage,
    has_images,
    identity_of,
    ids_of,
    image_borders,
    is_inside,
    keys_of,
)
from hearth.worker.prompt.prefill_cuts import TAIL_TOKENS_MAX, CutRule, TurnMarks

HEADER, ROLE_A, ROLE_U, NEWLINE, PAD = 1, 2, 3, 4, 5
CHUNK = 32
RULE = CutRule(CHUNK, TurnMarks(frozenset({HEADER}), ((HEADER, ROLE_A, NEWLINE),)))
BARE = CutRule(CHUNK, TurnMarks(frozenset(), ()))
ROOT = root_hash(["test"])


@dataclass(frozen=True)
class Text:
    length: int


@dataclass(frozen=True)
class Shown:
    name: int
    length: int


PARTS = st.one_of(
    st.builds(Text, st.integers(1, 90)), st.builds(Shown, st.integers(0, 2), st.integers(1, 120))
)
MESSAGES = st.lists(st.lists(PARTS, max_size=4), min_size=1, max_size=5)


def picture(name: int, length: int) -> PromptImage:
    return PromptImage(bytes([name]) * 16, (PAD,) * length, (), dict)


def prompt(messages: list[list[Text | Shown]]) -> tuple[list[int], list[ImageRun]]:
    ids: list[int] = []
    runs = []
    for at, parts in enumerate(messages):
        ids += [HEADER, ROLE_A if at % 2 else ROLE_U, NEWLINE]
        for part in parts:
            start = len(ids)
            if isinstance(part, Text):
                ids += [10 + n % 7 for n in range(part.length)]
            else:
                ids += [PAD] * part.length
                runs.append(ImageRun(start, len(ids), picture(part.name, part.length)))
    return [*ids, HEADER, ROLE_A, NEWLINE], runs


@given(MESSAGES)
def test_keys_are_ids_but_for_images_whose_borders_they_show(
    messages: list[list[Text | Shown]],
) -> None:
    ids, runs = prompt(messages)
    keys = keys_of(ids, runs)
    for end in (len(ids), len(ids) // 2):
        assert ids_of(keys[:end], runs).tolist() == ids[:end]
    amid = np.zeros(len(ids), dtype=bool)
    for run in runs:
        amid[run.start : run.end] = True
    assert np.array_equal(keys[~amid], np.array(ids)[~amid])
    assert (keys[amid] < 0).all() and has_images(keys) == bool(runs)
    starts, ends = image_borders(keys)
    assert starts == [run.start for run in runs]
    assert ends == [run.end for run in runs if not amid[run.end]]
    inside = {at for run in runs for at in range(run.start + 1, run.end)}
    assert {at for at in range(len(ids) + 2) if is_inside(keys, at)} == inside


@given(MESSAGES, st.data())
def test_another_image_is_another_prompt_from_its_first_token_on(
    messages: list[list[Text | Shown]], data: st.DataObject
) -> None:
    ids, runs = prompt(messages)
    keys = keys_of(ids, runs)
    if not runs:
        return
    number = data.draw(st.integers(0, len(runs) - 1))
    run = runs[number]
    others = list(runs)
    others[number] = ImageRun(run.start, run.end, picture(9, run.end - run.start))
    swapped = keys_of(ids, others)
    assert common_length(keys, swapped) == run.start
    cuts = RULE.cuts(keys)
    assert cuts == RULE.cuts(swapped)
    for cut, one, other in zip(
        cuts, prefix_hashes(ROOT, keys, cuts), prefix_hashes(ROOT, swapped, cuts), strict=True
    ):
        assert (one == other) == (cut <= run.start)


@given(MESSAGES)
def test_no_cut_is_amid_an_image_one_is_behind_it_and_what_is_fed_last_shows_none(
    messages: list[list[Text | Shown]],
) -> None:
    ids, runs = prompt(messages)
    keys = keys_of(ids, runs)
    for rule in (RULE, BARE):
        cuts = rule.cuts(keys)
        assert cuts == sorted(set(cuts)) and all(0 < cut < len(ids) for cut in cuts)
        assert not any(is_inside(keys, cut) for cut in cuts)
        assert set(image_borders(keys)[1]) <= set(cuts)
        last = cuts[-1] if cuts else 0
        assert 1 <= len(ids) - last <= TAIL_TOKENS_MAX and not has_images(keys[last:])
        borders = zip([0, *cuts], cuts, strict=False)
        assert all(b - a <= CHUNK or has_images(keys[a:b]) for a, b in borders)


@given(MESSAGES, MESSAGES)
def test_cuts_depend_on_the_prefix_alone(
    head: list[list[Text | Shown]], tail: list[list[Text | Shown]]
) -> None:
    (ids, runs), (more, _) = prompt(head), prompt(tail)
    keys = keys_of(ids, runs)
    natural = RULE.natural(keys)
    longer = RULE.cuts(np.concatenate([keys, np.array(more, dtype=np.int32)]))
    assert natural == longer[: len(natural)]


@given(st.integers(0, 255), st.integers(1, 4))
def test_the_identity_names_every_byte_shape_and_type(value: int, rows: int) -> None:
    pixels = np.full((rows, 6), value, dtype=np.uint8)
    same = {"pixel_values": pixels.copy(), "grid": np.array([[1, 2, 3]])}
    known = identity_of({"grid": np.array([[1, 2, 3]]), "pixel_values": pixels})
    assert known == identity_of(same) and len(known) == 16
    other = pixels.copy()
    other[0, 0] ^= 1
    changed = (
        {"pixel_values": other},
        {"pixel_values": pixels.reshape(6, rows)} if rows != 6 else {},
        {"pixel_values": pixels.astype(np.float32)},
        {"grid": np.array([[1, 3, 2]])},
    )
    assert all(identity_of(same | change) != known for change in changed if change)
