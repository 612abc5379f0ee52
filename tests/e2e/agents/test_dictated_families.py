"""Families' own words through the real server, in every dialect, whole and streamed.

tests/unit/worker/formats/test_families_are_read.py reads those of all families in-process.
"""

from collections.abc import Iterator

import pytest

from tests.helpers.by_day import by_day
from tests.helpers.families.dictated_server import DIALECTS, DictatedServer
from tests.helpers.families.family_cases import WEATHER, written_family
from tests.helpers.families.family_checks import JUDGED, plain

# Calls in elements behind a think block, in fenced JSON between tokens, in Python between tokens.
FAMILIES = ("longcat", "deepseek-v3", "functiongemma")


@pytest.fixture(scope="module", params=by_day(FAMILIES, ("longcat",)))
def dictated(request: pytest.FixtureRequest) -> Iterator[DictatedServer]:
    with DictatedServer(written_family(request.param)) as server:
        yield server


@pytest.mark.parametrize("stream", by_day([False, True], [True]))
@pytest.mark.parametrize("dialect", DIALECTS)
def test_what_a_family_writes_reaches_the_client_as_it_is_meant(
    dialect: str, stream: bool, dictated: DictatedServer
) -> None:
    for name in JUDGED.keys() & dictated.family.cases.keys():
        case = dictated.family.cases[name]
        told = dictated.told(name, dialect, stream=stream)
        got = [(call, plain(arguments)) for call, arguments in told.calls]
        assert got == [(call, plain(arguments)) for call, arguments in case.calls], name
        assert told.content.strip() == case.content, name
        assert told.reasoning.strip() == case.reasoning, name
        assert told.reason == ("tool_calls" if case.calls else "stop"), name


@pytest.mark.parametrize("stream", by_day([False, True], [True]))
@pytest.mark.parametrize("dialect", ["chat", "messages"])
def test_a_forced_call_comes_in_the_familys_own_form(
    dialect: str, stream: bool, dictated: DictatedServer
) -> None:
    told = dictated.told("call", dialect, stream=stream, choice="get_weather")
    assert told.calls == [("get_weather", WEATHER)] and not told.content.strip()
