"""A worker drafts by its setting, its mode, and what was found of its model and machine."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from hearth.shared.settings import Settings, load_settings
from hearth.worker.doctor.findings import Findings, Subject
from hearth.worker.draft.draft_length import CPU_CURVE
from hearth.worker.schedule.answer_drafts import DraftPolicy
from hearth.worker.setup.doctor_setup import are_trees_cheap, draft_policy, row_costs

SUBJECT = Subject("Apple M2 Max", "metal", "abc", "0.32.4", "0.32.2")
GOOD = Findings(SUBJECT, "bfloat16", row_costs={1: 1.0, 2: 1.1, 4: 1.05, 8: 1.4}, drafts_alike=True)


# It has no `verifies_drafts`: a policy that asked for that would try the model at the start.
ENGINE = SimpleNamespace(new_cache=list, decoder=SimpleNamespace(takes_trees=False))


def settings(mode: str) -> Settings:
    return load_settings({"SPECULATE": mode}, None)


def policy(
    mode: str, found: Findings | None = None, is_exact: bool = False, is_cpu: bool = False
) -> DraftPolicy:
    return draft_policy(settings(mode), found, ENGINE, is_exact=is_exact, is_cpu=is_cpu)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("found", "reach", "reason"),
    [
        (GOOD, "all", ""),
        (None, "none", "hearth doctor has not checked"),
        (replace(GOOD, drafts_alike=None), "none", "hearth doctor has not checked"),
        (replace(GOOD, row_costs=None), "none", "hearth doctor has not checked"),
        (replace(GOOD, drafts_alike=False), "none", "others than one by one"),
    ],
)
def test_auto_drafts_where_the_doctor_found_drafts_alike(
    found: Findings | None, reach: str, reason: str
) -> None:
    made = policy("auto", found)
    assert made.reach == reach
    assert reason in made.reason and bool(made.reason) == bool(reason)


def test_on_a_cpu_nothing_needs_to_be_found_and_no_measured_time_decides() -> None:
    assert policy("auto", None, is_cpu=True).reach == "all"
    assert policy("auto", GOOD, is_cpu=True).curve == CPU_CURVE


@pytest.mark.parametrize("mode", ["auto", "off", "forced", "lookup"])
def test_exact_mode_drafts_nothing_whatever_is_set_or_asked(mode: str) -> None:
    found = policy(mode, GOOD, is_exact=True)
    assert [found.of(asked) for asked in (None, True, False)] == ["none"] * 3
    assert "exact" in found.reason


def test_a_model_that_keeps_what_cannot_be_taken_back_is_not_drafted_for_whatever_is_asked() -> (
    None
):
    engine = SimpleNamespace(**(vars(ENGINE) | {"new_cache": lambda: [object()]}))
    found = draft_policy(settings("lookup"), GOOD, engine, is_exact=False, is_cpu=True)  # type: ignore[arg-type]
    assert [found.of(asked) for asked in (None, True)] == ["none"] * 2
    assert "cannot verify" in found.reason


def test_a_request_decides_for_itself() -> None:
    assert policy("off").of(True) == "all"
    assert policy("off").of(None) == "none"
    assert policy("lookup").of(False) == "none"
    assert policy("forced").of(None) == "forced"


def test_more_rows_never_cost_less() -> None:
    assert row_costs(GOOD) == {1: 1.0, 2: 1.1, 4: 1.1, 8: 1.4}


def test_branches_are_drafted_only_where_rows_are_cheap() -> None:
    assert are_trees_cheap(GOOD, is_cpu=False)
    assert not are_trees_cheap(replace(GOOD, row_costs={1: 1.0, 8: 1.6}), is_cpu=False)
    assert not are_trees_cheap(None, is_cpu=False)
    assert not are_trees_cheap(GOOD, is_cpu=True)
