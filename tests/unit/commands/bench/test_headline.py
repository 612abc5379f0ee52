"""README's sentence tells what was counted, and nothing that was not."""

import re
from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

from hearth.commands.bench.headline import (
    BEGIN,
    END,
    FIGURES,
    LINE_CHARS,
    NoFigureError,
    headline,
    main,
    with_figures,
    wrapped,
)
from hearth.commands.bench.results import HEARTH, Results, Sample, ServerFacts
from tests.helpers.bench.flat_results import headline_results


def told(results: Results) -> str:
    return " ".join(headline(results).split())


def changed(results: Results, server: str, **values: float) -> Results:
    """Return the results with `values` in all samples of a server."""
    results.add(
        Sample(each.model, each.server, each.workload, each.round, {**each.values, **values})
        for each in results.samples
        if each.server == server
    )
    return results


def test_the_sentence_tells_hearth_and_the_best_other_from_the_best_to_the_worst_model() -> None:
    text = told(headline_results())
    assert "dense, hybrid, window and vision stand-in models beside 4 other servers" in text
    assert "read **1.00 to 1.03 times** what a perfect cache would (1.50 to 1.53 times)" in text
    assert "costs **11 %** of its tokens (17 %)" in text
    assert "read **1.00 to 1.03 times** the ideal (1.50 to 1.53 times)" in text
    assert text.count("**") == 2 * len(FIGURES)


def test_models_that_people_work_with_are_no_stand_ins() -> None:
    results = headline_results()
    real = {name: replace(each, bytes=15_000_000_000) for name, each in results.models.items()}
    results.models |= real
    assert "dense, hybrid, window and vision models beside 4 other servers" in told(results)


WORDS = st.lists(st.sampled_from(("a", "plain", "`kill -9`", "**1.00 to 1.03 times**")), min_size=1)


@given(WORDS)
def test_lines_are_short_and_none_ends_within_code(words: list[str]) -> None:
    sentence = " ".join(words)
    lines = wrapped(sentence).splitlines()
    assert max(map(len, lines)) <= LINE_CHARS
    assert all(line.count("`") % 2 == 0 for line in lines)
    assert " ".join(lines) == sentence


def test_a_server_whose_requests_failed_is_not_the_best() -> None:
    text = told(changed(headline_results(), "other-0", failed=1.0))
    assert "(2.00 to 2.03 times)" in text


def test_a_server_that_nobody_counted_is_not_the_best() -> None:
    results = headline_results()
    results.servers["other-0"] = ServerFacts("other-0", "1", "", is_metered=False)
    assert "(2.00 to 2.03 times)" in told(results)


def test_the_best_other_is_chosen_for_each_model_anew() -> None:
    results = headline_results(others=2)
    results.samples = [
        each for each in results.samples if (each.model, each.server) != ("dense", "other-0")
    ]
    assert "(1.51 to 2.00 times)" in told(results)


def test_longer_prompts_of_another_server_are_its_own_loss() -> None:
    results = changed(headline_results(others=1), "other-0", ideal_tokens=9e9)
    assert "(1.50 to 1.53 times)" in told(results)


def test_small_shares_keep_a_digit() -> None:
    results = changed(headline_results(), HEARTH, prompt_tokens=1_000_000.0)
    assert "costs **0.1 %** of its tokens" in told(results)


def test_without_another_server_it_says_so() -> None:
    text = told(headline_results(others=0))
    assert "beside 0 other servers" in text and "(no other was counted)" in text


@pytest.mark.parametrize("workload", [name for figure in FIGURES for name in figure.workloads])
def test_a_figure_that_was_not_measured_is_not_made_up(workload: str) -> None:
    results = headline_results()
    results.samples = [each for each in results.samples if each.workload != workload]
    with pytest.raises(NoFigureError, match=workload):
        headline(results)


def test_hearths_own_failures_are_not_hidden_in_a_figure() -> None:
    with pytest.raises(NoFigureError, match="without failures"):
        headline(changed(headline_results(), HEARTH, failed=1.0))


def test_results_without_a_model_have_no_figure() -> None:
    results = headline_results()
    results.models.clear()
    with pytest.raises(NoFigureError, match="no model"):
        headline(results)


def test_only_what_is_between_the_marks_is_written() -> None:
    page = with_figures(f"before\n{BEGIN}old\n{END}behind\n", "new\n")
    assert page == f"before\n{BEGIN}new\n{END}behind\n"
    for broken in ("", BEGIN, END, f"{END}{BEGIN}"):
        with pytest.raises(NoFigureError, match="marks"):
            with_figures(broken, "new\n")


def test_what_is_missing_is_told(
    tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    place = tmp_path_factory.mktemp("none") / "results.json"
    assert main(["--results", str(place)]) == 1
    assert re.search(r"No such file.*results\.json", capsys.readouterr().err)
