"""Hypothesis settings of all tests: no deadlines, since kernels compile on first use."""

from hypothesis import HealthCheck, settings

settings.register_profile(
    "plait",
    deadline=None,
    max_examples=40,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("plait")
