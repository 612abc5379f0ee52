"""What all tests share."""

from hypothesis import HealthCheck, settings

# A busy machine draws examples slowly, and a first example may import a model's code: no verdict.
settings.register_profile("hearth", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("hearth")
