"""What a death cost: who waited and how long, the phases of the recovery, and whether the kernel killed for memory."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("deaths", sa.Column("world_size", sa.Integer()))
    op.add_column("deaths", sa.Column("memory_kills", sa.Integer()))
    op.add_column("deaths", sa.Column("memory_limit_bytes", sa.BigInteger()))
    op.add_column("deaths", sa.Column("waited", sa.JSON()))
    op.add_column("deaths", sa.Column("recovery", sa.JSON()))


def downgrade() -> None:
    for name in ("recovery", "waited", "memory_limit_bytes", "memory_kills", "world_size"):
        op.drop_column("deaths", name)
