"""builtin:minilm gives the vectors of sentence-transformers, whatever else is in the request.

The reference is in tests/data/sentence_cosines.json, with where it and the sentences are from.
"""

import json
from functools import cache
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
from numpy.typing import NDArray

from hearth.shared.errors import RequestError
from hearth.worker.embeddings.encoder_models import EmbeddingModel, LayerRests, cut_vectors
from hearth.worker.embeddings.job_queue import Job
from hearth.worker.embeddings.length_batches import ForwardPace
from tests.helpers.models.real_weights import real_weights

pytestmark = pytest.mark.weights

REFERENCE: Final = json.loads(
    (Path(__file__).parents[3] / "data" / "sentence_cosines.json").read_bytes()
)
PAIRS: Final = REFERENCE["pairs"]
FIRST: Final = [pair["first"] for pair in PAIRS]
SECOND: Final = [pair["second"] for pair in PAIRS]
GAP_MAX: Final = 1e-5  # measured on a CPU: 3.5e-7; GELU by tanh makes 5e-4


@cache
def minilm() -> tuple[EmbeddingModel, LayerRests]:
    rests = LayerRests()
    return EmbeddingModel(str(real_weights("minilm")), rests), rests


def vectors(*texts: str, truncate: bool = False, tokens: int = 512) -> NDArray[np.float32]:
    """Return the vectors of one request, computed in batches of at most `tokens`."""
    model, rests = minilm()
    found: list[Any] = []
    job = Job(1, model, texts, truncate, lambda values, _: found.append(values))  # type: ignore
    while not job.is_tokenised:
        job.tokenise()
    while not job.is_computed:
        job.compute(ForwardPace(10, tokens), rests.clock)
    job.answer()
    return cut_vectors(found[0], None)


def test_cosines_of_fifty_published_pairs_are_those_of_sentence_transformers() -> None:
    first, second = np.split(vectors(*FIRST, *SECOND), 2)
    others = np.roll(second, -1, axis=0)
    gaps = np.concatenate([(first * second).sum(1), (first * others).sum(1)])
    gaps -= [pair["cosine"] for pair in PAIRS] + [pair["next"] for pair in PAIRS]
    assert len(PAIRS) == 50 and np.abs(gaps).max() < GAP_MAX, np.abs(gaps).max()


def test_a_text_is_cut_where_sentence_transformers_cuts_it_and_refused_unless_that_is_asked() -> (
    None
):
    joined = [" ".join(FIRST), " ".join(SECOND)]
    first, second = vectors(*joined, truncate=True)
    assert abs(float(first @ second) - REFERENCE["joined"]) < GAP_MAX
    with pytest.raises(RequestError, match=r"Input 0 is 719 tokens and the model takes 256"):
        vectors(*joined)
