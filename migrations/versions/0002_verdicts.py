"""What guard and meta-controller said about each round."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("rounds", sa.Column("verdict", sa.String(length=16)))
    op.add_column("rounds", sa.Column("verdict_reason", sa.Text()))


def downgrade() -> None:
    op.drop_column("rounds", "verdict_reason")
    op.drop_column("rounds", "verdict")
