"""Segments as a grain makes them."""

from plait.cut import Segment


def run_of(first_word: int, items: int) -> Segment:
    """One run."""
    return Segment(first_word, items, 0, 1)


def runs_of(first_word: int, run: int, stride: int, repeats: int) -> Segment:
    """Several runs; or the one, whose stride is then none."""
    return Segment(first_word, run, stride, repeats) if repeats > 1 else run_of(first_word, run)
