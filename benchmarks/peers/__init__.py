"""What other systems would send for the same step: emulations, one file for each family of
published formats, written from its description, in numpy on one thread."""

from benchmarks.peers import coo, gaps, positions, whole, xor
from benchmarks.peers.base import Peer

PEERS: tuple[Peer, ...] = (
    positions.RAW, positions.PACKED, gaps.PEER, xor.PEER, coo.PEER, whole.PEER
)  # fmt: skip

__all__ = ["PEERS", "Peer"]
