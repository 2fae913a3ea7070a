"""The catalog: policies, versions, channels and where objects lie. One port, one SQL adapter."""

from plait_server.catalog.base import (
    Catalog,
    Draft,
    ManifestChunks,
    ReplicaRow,
    Resolved,
    StoredChunk,
    StoredDocument,
)
from plait_server.catalog.database import database_file
from plait_server.catalog.sql import SqlCatalog

__all__ = [
    "Catalog",
    "Draft",
    "ManifestChunks",
    "ReplicaRow",
    "Resolved",
    "SqlCatalog",
    "StoredChunk",
    "StoredDocument",
    "database_file",
]
