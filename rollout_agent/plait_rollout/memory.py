"""What a follower remembers over a restart: never what the engine holds, only what was seen."""

import logging
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from plait_client.disk import disk_errors, write_atomically

_logger = logging.getLogger(__name__)


class Memory(BaseModel):
    """The last move, in a small file.

    Attributes:
        epoch, generation: of the channel; an older generation of this epoch is refused.
        seq, fingerprint: reached by it. Tells apart versions of equal weights; proves nothing.
    """

    model_config = ConfigDict(frozen=True, strict=True)

    policy: str
    channel: str
    epoch: str
    generation: int
    seq: int
    fingerprint: str


def recall(path: Path, *, policy: str, channel: str) -> Memory | None:
    """The memory of following this channel; None: there is none, or it isn't readable."""
    try:
        memory = Memory.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValidationError) as error:
        _logger.warning("%s is not a follower's memory and is ignored: %s", path, error)
        return None
    return memory if (memory.policy, memory.channel) == (policy, channel) else None


def remember(path: Path, memory: Memory) -> None:
    """Writes it whole or not at all.

    Raises:
        StoreError: the disk refuses.
    """
    with disk_errors(f"write {path}"):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, memory.model_dump_json(indent=1).encode())
