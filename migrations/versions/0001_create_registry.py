"""Create the registry.

Revision ID: 0001
Revises:
"""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
DIGEST = sa.String(length=71)
FINGERPRINT = sa.String(length=32)
NAME = sa.String(length=128)


def upgrade() -> None:
    _create_objects()
    _create_manifests()
    _create_policies()
    _create_versions()
    _create_channels()
    _create_reports()


def downgrade() -> None:
    for table in (
        "replicas",
        "events",
        "channel_events",
        "channels",
        "versions",
        "edges",
        "states",
        "policies",
        "registry",
        "manifest_chunks",
        "manifests",
        "chunks",
        "documents",
    ):
        op.drop_table(table)


def _create_objects() -> None:
    """What is stored: documents, and chunks with their keys."""
    op.create_table(
        "documents",
        sa.Column("digest", DIGEST, nullable=False),
        sa.Column("format", sa.String(length=64), nullable=False),
        sa.Column("data", sa.LargeBinary(), nullable=False),
        sa.Column("size", sa.BigInteger(), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("digest", name=op.f("pk_documents")),
    )
    op.create_table(
        "chunks",
        sa.Column("id", ID, nullable=False),
        sa.Column("digest", DIGEST, nullable=False),
        sa.Column("size", sa.BigInteger(), nullable=False),
        sa.Column("storage_key", sa.String(length=512), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.CheckConstraint("state IN ('ready', 'condemned')", name=op.f("ck_chunks_state")),
        sa.CheckConstraint("size >= 0", name=op.f("ck_chunks_size")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_chunks")),
        sa.UniqueConstraint("storage_key", name=op.f("uq_chunks_storage_key")),
    )
    op.create_index(
        "uq_chunks_ready_digest",
        "chunks",
        ["digest"],
        unique=True,
        sqlite_where=sa.text("state = 'ready'"),
        postgresql_where=sa.text("state = 'ready'"),
    )


def _create_manifests() -> None:
    """Manifests and the chunks that they name."""
    op.create_table(
        "manifests",
        sa.Column("digest", DIGEST, nullable=False),
        sa.Column("kind", sa.String(length=16), nullable=False),
        sa.Column("external", sa.Integer(), nullable=False),
        sa.Column("layout_digest", DIGEST, nullable=False),
        sa.Column("cut_digest", DIGEST, nullable=True),
        sa.Column("base", FINGERPRINT, nullable=True),
        sa.Column("target", FINGERPRINT, nullable=False),
        sa.Column("changed_elements", sa.BigInteger(), nullable=False),
        sa.Column("changed_bytes", sa.BigInteger(), nullable=False),
        sa.Column("total_elements", sa.BigInteger(), nullable=False),
        sa.Column("dense_bytes", sa.BigInteger(), nullable=False),
        sa.Column("payload_bytes", sa.BigInteger(), nullable=False),
        sa.CheckConstraint("(kind = 'delta') = (base IS NOT NULL)", name=op.f("ck_manifests_base")),
        sa.CheckConstraint("kind IN ('delta', 'anchor')", name=op.f("ck_manifests_kind")),
        sa.ForeignKeyConstraint(
            ["cut_digest"], ["documents.digest"], name=op.f("fk_manifests_cut_digest")
        ),
        sa.ForeignKeyConstraint(["digest"], ["documents.digest"], name=op.f("fk_manifests_digest")),
        sa.ForeignKeyConstraint(
            ["layout_digest"], ["documents.digest"], name=op.f("fk_manifests_layout_digest")
        ),
        sa.PrimaryKeyConstraint("digest", name=op.f("pk_manifests")),
    )
    op.create_table(
        "manifest_chunks",
        sa.Column("manifest_digest", DIGEST, nullable=False),
        sa.Column("ordinal", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("chunk_id", ID, nullable=False),
        sa.Column("role", sa.String(length=16), nullable=False),
        sa.CheckConstraint("role IN ('chunk', 'side_file')", name=op.f("ck_manifest_chunks_role")),
        sa.ForeignKeyConstraint(
            ["chunk_id"],
            ["chunks.id"],
            name=op.f("fk_manifest_chunks_chunk_id"),
            ondelete="RESTRICT",
        ),
        sa.ForeignKeyConstraint(
            ["manifest_digest"],
            ["manifests.digest"],
            name=op.f("fk_manifest_chunks_manifest_digest"),
        ),
        sa.PrimaryKeyConstraint("manifest_digest", "ordinal", name=op.f("pk_manifest_chunks")),
    )
    op.create_index("ix_manifest_chunks_chunk_id", "manifest_chunks", ["chunk_id"], unique=False)


def _create_policies() -> None:
    """The epoch, the policies, and the graph of their states."""
    op.create_table(
        "registry",
        sa.Column("id", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("epoch", sa.String(length=32), nullable=False),
        sa.Column("revision", sa.BigInteger(), nullable=False),
        sa.CheckConstraint("id = 1", name=op.f("ck_registry_one_row")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_registry")),
    )
    op.create_table(
        "policies",
        sa.Column("id", ID, nullable=False),
        sa.Column("name", NAME, nullable=False),
        sa.Column("next_seq", sa.BigInteger(), nullable=False),
        sa.Column("graph_revision", sa.BigInteger(), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_policies")),
        sa.UniqueConstraint("name", name=op.f("uq_policies_name")),
    )
    op.create_table(
        "states",
        sa.Column("id", ID, nullable=False),
        sa.Column("policy_id", ID, nullable=False),
        sa.Column("layout_digest", DIGEST, nullable=False),
        sa.Column("fingerprint", FINGERPRINT, nullable=False),
        sa.ForeignKeyConstraint(
            ["layout_digest"], ["documents.digest"], name=op.f("fk_states_layout_digest")
        ),
        sa.ForeignKeyConstraint(["policy_id"], ["policies.id"], name=op.f("fk_states_policy_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_states")),
        sa.UniqueConstraint(
            "policy_id",
            "layout_digest",
            "fingerprint",
            name=op.f("uq_states_policy_id_layout_digest_fingerprint"),
        ),
    )
    op.create_table(
        "edges",
        sa.Column("policy_id", ID, nullable=False),
        sa.Column("manifest_digest", DIGEST, nullable=False),
        sa.Column("base_id", ID, nullable=True),
        sa.Column("target_id", ID, nullable=False),
        sa.Column("revision", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["base_id"], ["states.id"], name=op.f("fk_edges_base_id")),
        sa.ForeignKeyConstraint(
            ["manifest_digest"], ["manifests.digest"], name=op.f("fk_edges_manifest_digest")
        ),
        sa.ForeignKeyConstraint(["policy_id"], ["policies.id"], name=op.f("fk_edges_policy_id")),
        sa.ForeignKeyConstraint(["target_id"], ["states.id"], name=op.f("fk_edges_target_id")),
        sa.PrimaryKeyConstraint("policy_id", "manifest_digest", name=op.f("pk_edges")),
    )
    op.create_index("ix_edges_policy_id_revision", "edges", ["policy_id", "revision"], unique=False)


def _create_versions() -> None:
    """Versions, in order and by state."""
    op.create_table(
        "versions",
        sa.Column("id", ID, nullable=False),
        sa.Column("policy_id", ID, nullable=False),
        sa.Column("seq", sa.BigInteger(), nullable=False),
        sa.Column("parent_id", ID, nullable=True),
        sa.Column("digest", DIGEST, nullable=False),
        sa.Column("manifest_digest", DIGEST, nullable=False),
        sa.Column("state_id", ID, nullable=False),
        sa.Column("proof", sa.String(length=16), nullable=False),
        sa.Column("training", sa.Text(), nullable=False),
        sa.Column("channel", NAME, nullable=False),
        sa.Column("generation", sa.BigInteger(), nullable=False),
        sa.Column("actor", sa.Text(), nullable=False),
        sa.Column("graph_revision", sa.BigInteger(), nullable=False),
        sa.Column("committed_at", sa.BigInteger(), nullable=False),
        sa.CheckConstraint("seq >= 1", name=op.f("ck_versions_seq")),
        sa.ForeignKeyConstraint(["digest"], ["documents.digest"], name=op.f("fk_versions_digest")),
        sa.ForeignKeyConstraint(
            ["manifest_digest"], ["manifests.digest"], name=op.f("fk_versions_manifest_digest")
        ),
        sa.ForeignKeyConstraint(
            ["parent_id"], ["versions.id"], name=op.f("fk_versions_parent_id"), ondelete="RESTRICT"
        ),
        sa.ForeignKeyConstraint(["policy_id"], ["policies.id"], name=op.f("fk_versions_policy_id")),
        sa.ForeignKeyConstraint(["state_id"], ["states.id"], name=op.f("fk_versions_state_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_versions")),
        sa.UniqueConstraint("digest", name=op.f("uq_versions_digest")),
        sa.UniqueConstraint("policy_id", "seq", name=op.f("uq_versions_policy_id_seq")),
    )
    op.create_index(
        "ix_versions_policy_id_graph_revision",
        "versions",
        ["policy_id", "graph_revision"],
        unique=False,
    )
    op.create_index("ix_versions_state_id", "versions", ["state_id"], unique=False)


def _create_channels() -> None:
    """Channels, and every movement there ever was."""
    op.create_table(
        "channels",
        sa.Column("policy_id", ID, nullable=False),
        sa.Column("name", NAME, nullable=False),
        sa.Column("version_id", ID, nullable=False),
        sa.Column("generation", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["policy_id"], ["policies.id"], name=op.f("fk_channels_policy_id")),
        sa.ForeignKeyConstraint(
            ["version_id"],
            ["versions.id"],
            name=op.f("fk_channels_version_id"),
            ondelete="RESTRICT",
        ),
        sa.PrimaryKeyConstraint("policy_id", "name", name=op.f("pk_channels")),
    )
    op.create_table(
        "channel_events",
        sa.Column("policy_id", ID, nullable=False),
        sa.Column("channel", NAME, nullable=False),
        sa.Column("generation", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("from_id", ID, nullable=True),
        sa.Column("to_id", ID, nullable=False),
        sa.Column("kind", sa.String(length=16), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("actor", sa.Text(), nullable=False),
        sa.Column("move_id", sa.String(length=64), nullable=True),
        sa.Column("at", sa.BigInteger(), nullable=False),
        sa.CheckConstraint(
            "kind IN ('commit', 'create', 'promote', 'rollback')",
            name=op.f("ck_channel_events_kind"),
        ),
        sa.ForeignKeyConstraint(
            ["from_id"],
            ["versions.id"],
            name=op.f("fk_channel_events_from_id"),
            ondelete="RESTRICT",
        ),
        sa.ForeignKeyConstraint(
            ["policy_id"], ["policies.id"], name=op.f("fk_channel_events_policy_id")
        ),
        sa.ForeignKeyConstraint(
            ["to_id"], ["versions.id"], name=op.f("fk_channel_events_to_id"), ondelete="RESTRICT"
        ),
        sa.PrimaryKeyConstraint(
            "policy_id", "channel", "generation", name=op.f("pk_channel_events")
        ),
        sa.UniqueConstraint(
            "policy_id", "move_id", name=op.f("uq_channel_events_policy_id_move_id")
        ),
    )


def _create_reports() -> None:
    """What is told: events, and replicas' reports."""
    op.create_table(
        "events",
        sa.Column("revision", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("type", sa.String(length=32), nullable=False),
        sa.Column("policy", NAME, nullable=False),
        sa.Column("channel", NAME, nullable=True),
        sa.Column("payload", sa.Text(), nullable=False),
        sa.Column("at", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("revision", name=op.f("pk_events")),
    )
    op.create_table(
        "replicas",
        sa.Column("policy_id", ID, nullable=False),
        sa.Column("name", NAME, nullable=False),
        sa.Column("report", sa.Text(), nullable=False),
        sa.Column("last_seen_at", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["policy_id"], ["policies.id"], name=op.f("fk_replicas_policy_id")),
        sa.PrimaryKeyConstraint("policy_id", "name", name=op.f("pk_replicas")),
    )
