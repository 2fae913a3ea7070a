"""What a registry can do: the first thing that a client may ask."""

from plait.wire.base import Count, WireDocument


class ConfigDocument(WireDocument):
    """Sent by the registry; read by clients at start.

    Attributes:
        epoch: random, made with the database. Generations compare within one epoch only.
        formats: canonical document formats that it accepts.
        direct_store: the store's URL that agents may use themselves, if it told them to.
    """

    version: str
    epoch: str
    formats: list[str]
    chunk_bytes_max: Count
    document_bytes_max: Count
    wait_seconds_max: float
    direct_store: str | None = None
