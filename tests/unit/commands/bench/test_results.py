"""The results file keeps what was measured, through interruptions."""

import json
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from hearth.commands.bench.measures import MEASURES
from hearth.commands.bench.results import ModelFacts, Results, Sample, ServerFacts
from tests.helpers.bench.flat_results import empty_results

WORDS = st.text(st.characters(exclude_categories=["Cc", "Cf", "Cs"]), max_size=8)
NAMES = st.sampled_from(("a", "b"))
NUMBERS = st.floats(-1e15, 1e15)
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
    st.lists(SAMPLES, max_size=6, unique_by=lambda each: key(each)),
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


# ---------------------------------------------------------------- files of strangers

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=6,
)


def written(path: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    """Write a good file with one change."""
    results = empty_results()
    results.add([Sample("m", "hearth", "linear", 0, {"cpu_s": 1.0})])
    results.save(path)
    told = json.loads(path.read_text())
    change(told)
    path.write_text(json.dumps(told))
    return path


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda told: told.pop("models"), "models is no JSON object"),
        (lambda told: told.pop("began"), "it has no began"),
        (lambda told: told.update(rounds="many"), "rounds is 'many', and no count"),
        (lambda told: told.update(more=1), "'more', which nobody knows"),
        (lambda told: told.update(machine="x" * 10_001), "machine is no text"),
        (lambda told: told["samples"][0].update(round=-1), "round is -1"),
        (lambda told: told["samples"][0].update(round=30), "more than 30 rounds"),
        (lambda told: told.update(samples=told["samples"] * 2), "two samples of one round"),
        (lambda told: told["samples"][0]["values"].update(cpu_s="1"), "no number"),
        (lambda told: told["samples"][0]["values"].update(cpu_s=True), "no number"),
        (lambda told: told["samples"][0]["values"].update(cpu_s=float("nan")), "NaN"),
        (lambda told: told["samples"][0]["values"].update(cpu_s=float("-inf")), "-Infinity"),
        (lambda told: told["samples"][0]["values"].update(cpu_s=1e300), "no number"),
        (lambda told: told["samples"][0]["values"].update(cpu_s=10**400), "too large"),
        (lambda told: told["samples"][0]["values"].update(evil=1), "'evil', which nobody knows"),
        (lambda told: told["samples"][0].update(errors="text"), "errors is no list"),
        (lambda told: told["servers"]["hearth"].update(is_metered="no"), "is_metered"),
        (lambda told: told.update(models=dict.fromkeys("abc")), "models is no JSON object"),
        (lambda told: told.update(samples=[0] * 100_001), "samples at most"),
        (
            lambda told: told.update(models={str(at): told["models"]["m"] for at in range(101)}),
            "it has 101 models",
        ),
    ],
)
def test_a_file_that_nobody_saved_is_refused_with_its_fault(
    tmp_path: Path, change: Callable[[dict[str, Any]], object], said: str
) -> None:
    path = written(tmp_path / "results.json", change)
    with pytest.raises(ValueError) as caught:
        Results.load(path)
    assert said in str(caught.value) and "is no file of `hearth bench`" in str(caught.value)
    assert len(str(caught.value)) < 300 + len(str(path))


@pytest.mark.parametrize("text", ["", "[]", "3", "{", "\x00", "[" * 100_000, '{"format": 1e999}'])
def test_a_file_of_something_else_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "results.json"
    path.write_text(text)
    with pytest.raises(ValueError, match="no file of `hearth bench`"):
        Results.load(path)


def test_a_file_that_has_no_end_is_refused_before_it_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("hearth.commands.bench.results.FILE_BYTES_MAX", 1 << 20)
    with pytest.raises(ValueError, match="more than 1 MiB"):
        Results.load(Path("/dev/zero"))


@given(st.sampled_from(("command", "rounds", "models", "servers", "samples")), JSON)
def test_anything_in_a_file_is_read_or_refused(name: str, value: object) -> None:
    with TemporaryDirectory() as directory:
        path = written(Path(directory, "results.json"), lambda told: told.update({name: value}))
        try:
            results = Results.load(path)
        except ValueError:
            return
        assert isinstance(results, Results)


def test_what_steers_a_terminal_is_not_in_a_text_that_was_loaded(tmp_path: Path) -> None:
    text = "a\x1b]52;c;x\x07\u202eb\ud800"
    path = written(tmp_path / "r.json", lambda told: told["models"]["m"].update(label=text))
    label = Results.load(path).models["m"].label
    assert label == "a\ufffd]52;c;x\ufffd\ufffdb\ufffd"


def test_a_disk_that_is_full_leaves_the_file_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "results.json"
    empty_results().save(path)
    before = path.read_bytes()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("hearth.commands.bench.results.os.replace", full)
    with pytest.raises(OSError, match="No space"):
        empty_results(("other",)).save(path)
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


def test_a_value_that_nobody_knows_is_a_bug() -> None:
    with pytest.raises(AssertionError, match="nonsense"):
        Sample("m", "s", "w", 0, {"nonsense": 1.0})
