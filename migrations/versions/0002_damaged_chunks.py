"""Chunks that were found damaged; movements by the version that they lead to.

Revision ID: 0002
Revises: 0001
"""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    damaged = sa.Column("damaged", sa.Integer(), nullable=False, server_default=sa.text("0"))
    op.add_column("chunks", damaged)
    columns = ["to_id", "policy_id", "channel", "generation"]
    op.create_index("ix_channel_events_to_id", "channel_events", columns)


def downgrade() -> None:
    op.drop_index("ix_channel_events_to_id", "channel_events")
    op.drop_column("chunks", "damaged")
