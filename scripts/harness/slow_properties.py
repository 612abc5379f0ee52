"""Says how many examples a property that runs a model, or a whole grammar, may take."""

import math
from typing import Final

from hypothesis import HealthCheck, Phase, settings

EXAMPLES: Final = 25  # of any other property, in `test` (tests/conftest.py)


def slow(examples: int) -> settings:
    """For tests that run a model: few examples, and none spent on shrinking.

    Where the chosen profile draws 100 examples in place of 25, as at night, four times as many.
    """
    return settings(
        max_examples=math.ceil(examples * settings().max_examples / EXAMPLES),
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    )
