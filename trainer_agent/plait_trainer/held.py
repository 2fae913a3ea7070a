"""What a process holds of the model at one moment: its live tensors, and which blocks they are."""

from collections.abc import Iterable
from dataclasses import dataclass

from plait.errors import LayoutChanged
from plait.layout import Layout
from plait_trainer.blocks import BlockSpec
from plait_trainer.detector import LiveTensors
from plait_trainer.live import LiveTensor, block_of
from plait_trainer.share import Share


@dataclass(frozen=True, eq=False)
class Held:
    """One look at the model.

    Attributes:
        live: every tensor of which this process holds something, by name.
        blocks: what it holds of them, by name.
        layout: of those tensors, whole.
    """

    live: LiveTensors
    blocks: tuple[BlockSpec, ...]
    layout: Layout

    @classmethod
    def of(cls, tensors: Iterable[LiveTensor]) -> "Held":
        """
        Raises:
            LayoutInvalid: a name occurs twice, or a shape that no layout can have.
        """
        blocks = [(block_of(tensor), tensor) for tensor in tensors]
        layout = Layout.of(block.whole for block, _ in blocks)
        by_name = {block.name: (block, tensor) for block, tensor in blocks}
        ordered = [by_name[spec.name] for spec in layout.tensors]
        live = {block.name: tensor for block, tensor in ordered}
        return cls(live, tuple(block for block, _ in ordered), layout)

    def require_same(self, now: "Held") -> None:
        """Refuses another look at the model that shows other tensors, or other blocks of them.

        Raises:
            LayoutChanged: with differences in words.
        """
        if self.blocks == now.blocks:
            return
        # Compared by its rows first: the digest of 10^5 tensors takes half a second.
        if self.layout != now.layout:
            self.layout.require_equal(now.layout, what="the model")
        before, after = next(
            pair for pair in zip(self.blocks, now.blocks, strict=True) if pair[0] != pair[1]
        )
        raise LayoutChanged(
            f"this process holds the block at {list(after.offsets)} of {list(after.sizes)} of "
            f"{after.name!r}, and held the one at {list(before.offsets)} of {list(before.sizes)}",
            remedy="attach again",
        )

    def published(self, share: Share) -> LiveTensors:
        """The live tensors of a share's local layout."""
        if len(share.local.tensors) == len(self.live):
            return self.live
        return {spec.name: self.live[spec.name] for spec in share.local.tensors}
