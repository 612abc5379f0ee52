"""What all tests share."""

from hypothesis import HealthCheck, settings

# A busy machine draws examples slowly, and a first example may import a model's code: no verdict.
settings.register_profile("hearth", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("hearth")
# `--hypothesis-profile=same` tries the same examples each time, so that CI judges a change by the
# change and not by chance; at a desk each run tries new ones.
settings.register_profile("same", settings.get_profile("hearth"), derandomize=True)
