"""The results file keeps what was measured, through interruptions."""

import json
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings, strategies as st

from hearth.commands.bench.measures import MEASURES
from hearth.commands.bench.results import ModelFacts, Results, Sample, ServerFacts
from tests.helpers.bench.flat_results import empty_results

WORDS = st.text(max_size=8)
NAMES = st.sampled_from(("a", "b"))
NUMBERS = st.floats(allow_nan=False, allow_infinity=False)
SAMPLES = st.builds(
    Sample,
    model=NAMES,
    server=NAMES,
    workload=NAMES,
    round=st.integers(0, 3),
    values=st.dictionaries(st.sampled_from(sorted(MEASURES)), NUMBERS, max_size=3),
    digests=st.lists(WORDS, max_size=2).map(tuple),
    errors=st.lists(WORDS, max_size=2).map(tuple),
    load=NUMBERS,
    began=WORDS,
)
SERVERS = st.builds(
    ServerFacts, WORDS, WORDS, WORDS, st.booleans(), st.lists(WORDS, max_size=2).map(tuple)
)
MODELS = st.builds(ModelFacts, WORDS, WORDS, WORDS, st.integers(0, 1 << 40), st.integers(0, 16))
RESULTS = st.builds(
    Results,
    *[WORDS] * 5,
    st.integers(1, 9),
    WORDS,
    st.dictionaries(NAMES, MODELS),
    st.dictionaries(NAMES, SERVERS),
    st.lists(SAMPLES, max_size=6),
)


@settings(max_examples=50)
@given(RESULTS)
def test_what_was_saved_is_loaded_again(results: Results) -> None:
    with TemporaryDirectory() as directory:
        path = Path(directory, "below", "results.json")
        results.save(path)
        assert Results.load(path) == results
        assert [each.name for each in path.parent.iterdir()] == [path.name]


def key(sample: Sample) -> tuple[str, str, str, int]:
    return sample.model, sample.server, sample.workload, sample.round


@given(st.lists(SAMPLES, max_size=20), st.integers(0, 20))
def test_a_run_that_is_resumed_keeps_one_sample_a_round_the_last(
    samples: list[Sample], cut: int
) -> None:
    results = empty_results()
    results.add(samples[:cut])
    with TemporaryDirectory() as directory:
        path = Path(directory, "results.json")
        results.save(path)
        results = Results.load(path)
    for sample in samples[cut:]:
        results.add([sample])
    last = {key(sample): sample for sample in samples}
    assert {key(each): each for each in results.samples} == last
    assert len(results.samples) == len(last)
    found = results.of("a", "b", "a")
    assert [each.round for each in found] == sorted(
        key[3] for key in last if key[:3] == tuple("aba")
    )


def test_a_file_of_another_format_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    empty_results().save(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": 99}))
    with pytest.raises(ValueError, match="format 99"):
        Results.load(path)


def test_a_value_that_nobody_knows_is_a_bug() -> None:
    with pytest.raises(AssertionError, match="nonsense"):
        Sample("m", "s", "w", 0, {"nonsense": 1.0})
