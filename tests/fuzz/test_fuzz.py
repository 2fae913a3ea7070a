"""A short run of every fuzz target. The long one is `make fuzz`, which steers by coverage."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fuzz.targets import TARGETS
from tests.fuzz.watch import bounded


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    """Compiling the kernels isn't work that an input causes."""
    for target in TARGETS.values():
        for seed in range(64):
            target(bytes((seed * 37 + i * seed * 11) % 256 for i in range(80)))


@pytest.mark.parametrize("name", TARGETS)
@given(data=st.binary(max_size=400))
@settings(max_examples=250, deadline=None, suppress_health_check=list(HealthCheck))
def test_hostile_input_is_refused_or_read_right(name: str, data: bytes) -> None:
    bounded(TARGETS[name], data)
