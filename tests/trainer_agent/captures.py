"""Captures compared: two detectors that watched one run found the same, bit for bit."""

import numpy as np

from plait_trainer.detector import Capture


def assert_same_capture(found: Capture, wanted: Capture) -> None:
    assert found.fingerprint == wanted.fingerprint
    assert list(found.deltas) == list(wanted.deltas)
    for number, delta in wanted.deltas.items():
        np.testing.assert_array_equal(found.deltas[number].positions, delta.positions)
        np.testing.assert_array_equal(found.deltas[number].differences, delta.differences)
        assert found.deltas[number].increment == delta.increment
