"""Chooses tokens in the rows of a forward that verifies a draft, as if one by one.

Row 0 is behind the last known token, row n + 1 behind the draft's node n. Each row is processed
as if the tokens on its path had been said, and drawn with the key of its place in the answer: so
what is accepted is what the model would have said without a draft, for the same logits.
Owner: the inference thread.
"""

from collections.abc import Iterator, Sequence

import mlx.core as mx

from hearth.worker.draft.draft import Draft
from hearth.worker.engine.decode.decoding_sequence import DecodingRow


def accepted_path(draft: Draft, chosen: Sequence[int]) -> list[int]:
    """Return the nodes, from the first on, that are what the rows have `chosen`."""
    children = {
        (parent, token): node
        for node, (token, parent) in enumerate(zip(draft.tokens, draft.parents, strict=True))
    }
    path: list[int] = []
    node: int | None = children.get((-1, chosen[0]))
    while node is not None:
        path.append(node)
        node = children.get((node, chosen[node + 1]))
    return path


def row_places(place: int, draft: Draft) -> list[int]:
    """Return the places in the answer of the tokens that the rows choose, the first `place`."""
    places = [place]
    for parent in draft.parents:
        places.append(places[parent + 1] + 1)
    return places


def process_rows(row: DecodingRow, token_id: int, draft: Draft, logits: mx.array) -> mx.array:
    """Return logits (nodes + 1, vocabulary) as the sequence's processors leave them.

    `token_id` is the last known token, which its context then holds.
    """
    if row.context is None:
        return logits
    context = row.context.update_and_fetch(mx.array([token_id], dtype=mx.int32))
    if row.choice.processors:
        processed = []
        for number, path in enumerate(_paths(draft)):
            known = mx.concatenate([context, mx.array(path, mx.int32)]) if path else context
            one = logits[number : number + 1]
            for process in row.choice.processors:
                one = process(known, one)
            processed.append(one)
        logits = mx.concatenate(processed)
    guide = row.choice.guide
    assert guide is None or draft.is_chain, "a guide follows one path"
    return logits if guide is None else guide.process_rows(draft.tokens, logits)


def _paths(draft: Draft) -> Iterator[list[int]]:
    """Yield for each row the draft's tokens that it is behind."""
    paths: list[list[int]] = [[]]
    for token, parent in zip(draft.tokens, draft.parents, strict=True):
        paths.append([*paths[parent + 1], token])
    yield from paths
