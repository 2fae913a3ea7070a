"""A cut along a parallel grain: matrices in two blocks of columns, vectors whole."""

from plait.cut import Cut, FrameSpec, Segment
from plait.layout import Layout


def column_cut(layout: Layout) -> Cut:
    frames: list[FrameSpec] = []
    halves: tuple[list[Segment], list[Segment]] = ([], [])
    whole: list[Segment] = []
    for tensor, start in zip(layout.tensors, layout.starts, strict=False):
        if len(tensor.shape) != 2:
            whole.append(Segment(start, tensor.items, 0, 1))
            continue
        rows, columns = tensor.shape
        for half, segments in enumerate(halves):
            first = start + half * (columns // 2)
            segments.append(Segment(first, columns // 2, columns, rows))
    frames += [FrameSpec(2, tuple(segments)) for segments in (*halves, whole)]
    cut = Cut(layout.digest, tuple(frames))
    cut.check_against(layout)
    return cut
