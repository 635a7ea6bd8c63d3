"""Where a run goes on from; what became of checkpoints."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("runs", sa.Column("resumed_run", sa.BigInteger()))
    for name in ("resumed_checkpoint", "resumed_round", "resumed_epochs"):
        op.add_column("runs", sa.Column(name, sa.Integer()))
    op.add_column("checkpoints", sa.Column("loss", sa.Double()))
    op.add_column("checkpoints", sa.Column("pruned", sa.Boolean()))


def downgrade() -> None:
    op.drop_column("checkpoints", "pruned")
    op.drop_column("checkpoints", "loss")
    for name in ("resumed_epochs", "resumed_round", "resumed_checkpoint", "resumed_run"):
        op.drop_column("runs", name)
