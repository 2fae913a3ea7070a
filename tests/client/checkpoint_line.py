"""A published line of versions, for tests that need one to begin with."""

from dataclasses import dataclass
from pathlib import Path

from plait_client.fetch import Fetcher
from plait_client.publish import Request, publish
from tests.client import checkpoints
from tests.client.checkpoints import Bits


@dataclass(frozen=True)
class Line:
    """Versions 1, 2, … of a policy, and the folders that they were published from."""

    policy: str
    root: Path
    versions: list[Bits]

    def ref(self, seq: int) -> str:
        return f"{self.policy}@{seq}"

    def folder(self, seq: int) -> Path:
        return self.root / str(seq)


def make_line(fetcher: Fetcher, policy: str, root: Path, count: int, *, seed: int = 0) -> Line:
    """Publish an anchor and `count - 1` deltas."""
    versions = [checkpoints.first_bits(seed)]
    while len(versions) < count:
        versions.append(checkpoints.stepped(versions[-1], seed + len(versions)))
    line = Line(policy, root, versions)
    for seq, bits in enumerate(versions, start=1):
        checkpoints.write(line.folder(seq), bits)
        assert publish(Request(line.folder(seq), policy), fetcher).seq == seq
    return line
