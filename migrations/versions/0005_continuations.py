"""What a restarted controller needs to go on with a cohort that still lives."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    key = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
    op.create_table(
        "continuations",
        sa.Column("run_id", key, autoincrement=False, nullable=False),
        sa.Column("slot", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("at", sa.String(24), nullable=False),
        sa.Column("state", sa.JSON(none_as_null=True)),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name="fk_continuations_run_id_runs"),
        sa.PrimaryKeyConstraint("run_id", "slot", name="pk_continuations"),
    )


def downgrade() -> None:
    op.drop_table("continuations")
