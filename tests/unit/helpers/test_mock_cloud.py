"""The mock cloud refuses what the real services refuse: else no crossing would be tested."""

from typing import Any, Final

import pytest
import yaml

from hearth.shared.paths import PROJECT_DIR
from tests.helpers.cloud.cloud_answers import CloudMemory
from tests.helpers.cloud.cloud_bodies import RefusedBody, check_body

CASES: Final = yaml.safe_load((PROJECT_DIR / "tests/data/mock_cloud.yaml").read_text())
MEMORY: Final = CloudMemory(seals={"SEALED": "deep"})
MEMORY.items |= {"rs_mine": (True, None), "msg_mine": (True, "rs_mine"), "rs_apart": (False, None)}


def checked(case: dict[str, Any]) -> None:
    ((dialect, body),) = case.items()
    more = {"max_tokens": 2000} if dialect == "messages" else {}
    check_body(dialect, {"model": "m", **more, **body}, MEMORY)


def test_its_own_is_taken_back() -> None:
    for case in CASES["taken"]:
        checked(case)


@pytest.mark.parametrize("case", CASES["refused"], ids=str)
def test_what_it_did_not_make_or_does_not_know_is_refused(case: dict[str, Any]) -> None:
    with pytest.raises(RefusedBody):
        checked(case)
