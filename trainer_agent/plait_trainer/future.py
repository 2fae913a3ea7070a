"""What `publish` hands back: a future of the version, and what the publish cost."""

from concurrent.futures import Future
from dataclasses import dataclass

from plait.wire import VersionDocument


@dataclass
class PublishMetrics:
    """Where the time of one publish went, in seconds, and what it moved.

    Attributes:
        detect_seconds: on the training thread; the only part that the training step waits for.
        encode_seconds, upload_seconds, commit_seconds: behind it.
        changed_elements: committed by this publish, whatever earlier ones left to it included.
        payload_bytes: what a follower at the base fetches.
    """

    detect_seconds: float = 0.0
    encode_seconds: float = 0.0
    upload_seconds: float = 0.0
    commit_seconds: float = 0.0
    changed_elements: int = 0
    payload_bytes: int = 0

    def line_of(self, version: VersionDocument) -> str:
        """One line for the log."""
        return (
            f"published {version.policy}@{version.seq} ({version.kind}, "
            f"{version.changed_elements} of {version.total_elements} elements, "
            f"{version.payload_bytes} bytes) detect {self.detect_seconds:.3f} s, "
            f"encode {self.encode_seconds:.3f} s, upload {self.upload_seconds:.3f} s, "
            f"commit {self.commit_seconds:.3f} s"
        )


class PublishFuture(Future[VersionDocument]):
    """The version that a publish becomes part of.

    It fails with the error that kept the publish from being committed. Its changes aren't lost
    then: they are part of the next publish. It can't be cancelled: what was captured is already
    part of the line.

    Attributes:
        metrics: complete once the future is done.
    """

    def __init__(self, metrics: PublishMetrics) -> None:
        super().__init__()
        self.metrics = metrics

    @property
    def version(self) -> VersionDocument:
        """The committed version; waits for it.

        Raises:
            PlaitError: the publish failed.
        """
        return self.result()

    def cancel(self) -> bool:
        return False
