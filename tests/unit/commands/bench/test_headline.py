"""README's sentence tells what was counted, and nothing that was not."""

from dataclasses import replace

import pytest

from hearth.commands.bench.headline import KILLED, LINE_CHARS, SUB_AGENTS, headline
from hearth.commands.bench.results import HEARTH, Results
from tests.helpers.bench.flat_results import MODELS, headline_results


def told(results: Results) -> str:
    assert max(map(len, headline(results).splitlines())) <= LINE_CHARS
    return " ".join(headline(results).split())


def changed(results: Results, server: str, **values: float) -> Results:
    """Return the results with `values` in all rounds of a server."""
    for model, name, workload in list(results.places()):
        if name == server:
            cell = results.cell(model, name, workload)
            cell.values |= {measure: [value] * 5 for measure, value in values.items()}
    return results


def test_the_sentence_tells_hearth_and_the_best_other_from_the_best_to_the_worst_model() -> None:
    text = told(headline_results())
    assert text.startswith(
        "On four tiny models, in sessions with sub-agents, Hearth read **1.00 to"
    )
    assert "for each model read 1.50 to 1.53 times. After `kill -9`" in text
    assert "**11.1 to 11.4 %** of the last prompt again" in text


def test_a_server_whose_requests_failed_is_not_the_best() -> None:
    assert "read 2.00 to 2.03 times" in told(changed(headline_results(), "other-0", failed=1.0))


def test_a_server_that_nobody_counted_is_not_the_best() -> None:
    results = headline_results()
    results.servers["other-0"] = replace(results.servers["other-0"], is_metered=False)
    assert "read 2.00 to 2.03 times" in told(results)


def test_the_best_other_is_chosen_for_each_model_anew() -> None:
    results = headline_results(others=2)
    del results.cells[MODELS[0]]["other-0"]
    assert "read 1.51 to 2.00 times" in told(results)


@pytest.mark.parametrize("workload", [*SUB_AGENTS, *KILLED])
def test_a_figure_that_was_not_measured_is_not_made_up(workload: str) -> None:
    results = headline_results()
    del results.cells[MODELS[0]][HEARTH][workload]
    with pytest.raises(ValueError, match="no count"):
        headline(results)


def test_hearths_own_failures_are_not_hidden_in_a_figure() -> None:
    with pytest.raises(ValueError, match="no count"):
        headline(changed(headline_results(), HEARTH, failed=1.0))
