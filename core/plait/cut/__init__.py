"""The cut: how a layout is divided into frames, named by digest and shared by many manifests.

A frame is given by affine segments in the order of its items, so that a whole model, a flat shard,
a block of rows and a block of columns are all coded alike.
"""

from plait.cut.document import FORMAT, Cut
from plait.cut.frame import ITEM_SIZES, FrameSpec, Segment, items_max
from plait.cut.plain import plain_cut

__all__ = [
    "FORMAT",
    "ITEM_SIZES",
    "Cut",
    "FrameSpec",
    "Segment",
    "items_max",
    "plain_cut",
]
