"""Every table of the catalog. Times are microseconds since 1970 (UTC); documents are their bytes.

What can be recomputed from a manifest's bytes (sizes, counts) is kept beside it in columns, so that
listings and plans never parse documents.
"""

from typing import Final

from sqlalchemy import (
    BigInteger,
    CheckConstraint,
    Column,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    UniqueConstraint,
    text,
)

metadata: Final = MetaData(
    naming_convention={
        "ix": "ix_%(column_0_N_label)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "ck": "ck_%(table_name)s_%(constraint_name)s",
        "fk": "fk_%(table_name)s_%(column_0_N_name)s",
        "pk": "pk_%(table_name)s",
    }
)

# SQLite numbers rows by itself only where the column is exactly INTEGER.
_Id = BigInteger().with_variant(Integer, "sqlite")
_Digest = String(71)
_Fingerprint = String(32)
_Name = String(128)

# One row: the epoch, made with the database, and the counter that every event takes its revision
# from inside the transaction. (A sequence would hand out numbers that commit out of order.)
registry: Final = Table(
    "registry",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=False),
    Column("epoch", String(32), nullable=False),
    Column("revision", BigInteger, nullable=False),
    CheckConstraint("id = 1", name="one_row"),
)

policies: Final = Table(
    "policies",
    metadata,
    Column("id", _Id, primary_key=True),
    Column("name", _Name, nullable=False, unique=True),
    Column("next_seq", BigInteger, nullable=False),
    Column("graph_revision", BigInteger, nullable=False),
    Column("created_at", BigInteger, nullable=False),
)

documents: Final = Table(
    "documents",
    metadata,
    Column("digest", _Digest, primary_key=True),
    Column("format", String(64), nullable=False),
    Column("data", LargeBinary, nullable=False),
    Column("size", BigInteger, nullable=False),
    Column("created_at", BigInteger, nullable=False),
)

chunks: Final = Table(
    "chunks",
    metadata,
    Column("id", _Id, primary_key=True),
    Column("digest", _Digest, nullable=False),
    Column("size", BigInteger, nullable=False),
    Column("storage_key", String(512), nullable=False, unique=True),
    Column("state", String(16), nullable=False),
    # 1: its object was read and isn't the chunk.
    Column("damaged", Integer, nullable=False, server_default=text("0")),
    Column("created_at", BigInteger, nullable=False),
    CheckConstraint("size >= 0", name="size"),
    CheckConstraint("state IN ('ready', 'condemned')", name="state"),
    # A condemned chunk frees its digest at once: a new upload gets a row and a key of its own.
    Index(
        "uq_chunks_ready_digest",
        "digest",
        unique=True,
        sqlite_where=text("state = 'ready'"),
        postgresql_where=text("state = 'ready'"),
    ),
)

manifests: Final = Table(
    "manifests",
    metadata,
    Column("digest", _Digest, ForeignKey("documents.digest"), primary_key=True),
    Column("kind", String(16), nullable=False),
    Column("external", Integer, nullable=False),
    Column("layout_digest", _Digest, ForeignKey("documents.digest"), nullable=False),
    Column("cut_digest", _Digest, ForeignKey("documents.digest"), nullable=True),
    Column("base", _Fingerprint, nullable=True),
    Column("target", _Fingerprint, nullable=False),
    Column("changed_elements", BigInteger, nullable=False),
    Column("changed_bytes", BigInteger, nullable=False),
    Column("total_elements", BigInteger, nullable=False),
    Column("dense_bytes", BigInteger, nullable=False),
    Column("payload_bytes", BigInteger, nullable=False),
    CheckConstraint("kind IN ('delta', 'anchor')", name="kind"),
    CheckConstraint("(kind = 'delta') = (base IS NOT NULL)", name="base"),
)

# RESTRICT: the database itself refuses to drop a chunk that a manifest names.
manifest_chunks: Final = Table(
    "manifest_chunks",
    metadata,
    Column("manifest_digest", _Digest, ForeignKey("manifests.digest"), primary_key=True),
    Column("ordinal", Integer, primary_key=True, autoincrement=False),
    Column("chunk_id", _Id, ForeignKey("chunks.id", ondelete="RESTRICT"), nullable=False),
    Column("role", String(16), nullable=False),
    CheckConstraint("role IN ('chunk', 'side_file')", name="role"),
    Index("ix_manifest_chunks_chunk_id", "chunk_id"),
)

# What weights of a policy have been: the nodes of its graph.
states: Final = Table(
    "states",
    metadata,
    Column("id", _Id, primary_key=True),
    Column("policy_id", _Id, ForeignKey("policies.id"), nullable=False),
    Column("layout_digest", _Digest, ForeignKey("documents.digest"), nullable=False),
    Column("fingerprint", _Fingerprint, nullable=False),
    UniqueConstraint("policy_id", "layout_digest", "fingerprint"),
)

# Manifests of a policy: the edges. `revision` is the policy's graph revision that added it.
edges: Final = Table(
    "edges",
    metadata,
    Column("policy_id", _Id, ForeignKey("policies.id"), primary_key=True),
    Column("manifest_digest", _Digest, ForeignKey("manifests.digest"), primary_key=True),
    Column("base_id", _Id, ForeignKey("states.id"), nullable=True),
    Column("target_id", _Id, ForeignKey("states.id"), nullable=False),
    Column("revision", BigInteger, nullable=False),
    Index("ix_edges_policy_id_revision", "policy_id", "revision"),
)

versions: Final = Table(
    "versions",
    metadata,
    Column("id", _Id, primary_key=True),
    Column("policy_id", _Id, ForeignKey("policies.id"), nullable=False),
    Column("seq", BigInteger, nullable=False),
    Column("parent_id", _Id, ForeignKey("versions.id", ondelete="RESTRICT"), nullable=True),
    Column("digest", _Digest, ForeignKey("documents.digest"), nullable=False, unique=True),
    Column("manifest_digest", _Digest, ForeignKey("manifests.digest"), nullable=False),
    Column("state_id", _Id, ForeignKey("states.id"), nullable=False),
    Column("proof", String(16), nullable=False),
    Column("training", Text, nullable=False),  # the record's metadata, as JSON
    Column("channel", _Name, nullable=False),
    Column("generation", BigInteger, nullable=False),
    Column("actor", Text, nullable=False),
    Column("graph_revision", BigInteger, nullable=False),
    Column("committed_at", BigInteger, nullable=False),
    UniqueConstraint("policy_id", "seq"),
    CheckConstraint("seq >= 1", name="seq"),
    Index("ix_versions_state_id", "state_id"),
    Index("ix_versions_policy_id_graph_revision", "policy_id", "graph_revision"),
)

channels: Final = Table(
    "channels",
    metadata,
    Column("policy_id", _Id, ForeignKey("policies.id"), primary_key=True),
    Column("name", _Name, primary_key=True),
    Column("version_id", _Id, ForeignKey("versions.id", ondelete="RESTRICT"), nullable=False),
    Column("generation", BigInteger, nullable=False),
)

# Every movement, for ever. `move_id` makes an operator's repeat find its first answer.
channel_events: Final = Table(
    "channel_events",
    metadata,
    Column("policy_id", _Id, ForeignKey("policies.id"), primary_key=True),
    Column("channel", _Name, primary_key=True),
    Column("generation", BigInteger, primary_key=True, autoincrement=False),
    Column("from_id", _Id, ForeignKey("versions.id", ondelete="RESTRICT"), nullable=True),
    Column("to_id", _Id, ForeignKey("versions.id", ondelete="RESTRICT"), nullable=False),
    Column("kind", String(16), nullable=False),
    Column("reason", Text, nullable=False),
    Column("actor", Text, nullable=False),
    Column("move_id", String(64), nullable=True),
    Column("at", BigInteger, nullable=False),
    UniqueConstraint("policy_id", "move_id"),
    CheckConstraint("kind IN ('commit', 'create', 'promote', 'rollback')", name="kind"),
    # All four, or SQLite would rather read every movement of the channel.
    Index("ix_channel_events_to_id", "to_id", "policy_id", "channel", "generation"),
)

events: Final = Table(
    "events",
    metadata,
    Column("revision", BigInteger, primary_key=True, autoincrement=False),
    Column("type", String(32), nullable=False),
    Column("policy", _Name, nullable=False),
    Column("channel", _Name, nullable=True),
    Column("payload", Text, nullable=False),
    Column("at", BigInteger, nullable=False),
)

replicas: Final = Table(
    "replicas",
    metadata,
    Column("policy_id", _Id, ForeignKey("policies.id"), primary_key=True),
    Column("name", _Name, primary_key=True),
    Column("report", Text, nullable=False),
    Column("last_seen_at", BigInteger, nullable=False),
)
