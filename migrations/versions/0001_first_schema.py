"""The first schema: runs and all that is remembered of them, one-time tokens."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    op.create_table(
        "runs",
        sa.Column("id", _ID, nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("job", sa.Text(), nullable=False),
        sa.Column("params", sa.JSON()),
        sa.Column("config", sa.JSON()),
        sa.Column("mode", sa.Text(), nullable=False),
        sa.Column("phase", sa.String(length=16), nullable=False),
        sa.Column("reason", sa.Text()),
        sa.Column("stopped_by", sa.Text()),
        sa.Column("created_at", sa.String(length=24), nullable=False),
        sa.Column("started_at", sa.String(length=24)),
        sa.Column("ended_at", sa.String(length=24)),
        sa.Column("world_size", sa.Integer()),
        sa.Column("epochs_done", sa.Integer()),
        sa.Column("rounds_done", sa.Integer()),
        sa.Column("global_step", sa.BigInteger()),
        sa.Column("loss", sa.Double()),
        sa.Column("metrics", sa.JSON()),
        sa.Column("job_hash", sa.Text()),
        sa.Column("emulated", sa.Boolean(), nullable=False),
        sa.Column("summary", sa.JSON()),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_runs")),
        sqlite_autoincrement=True,
    )
    op.create_index(op.f("ix_runs_phase"), "runs", ["phase"])
    op.create_table(
        "tokens",
        sa.Column("id", _ID, nullable=False),
        sa.Column("kind", sa.String(length=32), nullable=False),
        sa.Column("hash", sa.String(length=64), nullable=False),
        sa.Column("created_at", sa.String(length=24), nullable=False),
        sa.Column("used_at", sa.String(length=24)),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_tokens")),
        sa.UniqueConstraint("hash", name=op.f("uq_tokens_hash")),
        sqlite_autoincrement=True,
    )
    op.create_table(
        "checkpoints",
        sa.Column("id", _ID, nullable=False),
        sa.Column("run_id", _ID, autoincrement=False, nullable=False),
        sa.Column("checkpoint", sa.Integer(), nullable=False),
        sa.Column("at", sa.String(length=24), nullable=False),
        sa.Column("round", sa.Integer()),
        sa.Column("epoch", sa.Integer()),
        sa.Column("global_step", sa.BigInteger()),
        sa.Column("reason", sa.Text()),
        sa.Column("path", sa.Text(), nullable=False),
        sa.Column("bytes", sa.BigInteger()),
        sa.Column("sha256", sa.String(length=64)),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_checkpoints_run_id_runs")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_checkpoints")),
        sa.UniqueConstraint("run_id", "checkpoint", name=op.f("uq_checkpoints_run_id_checkpoint")),
        sqlite_autoincrement=True,
    )
    op.create_table(
        "deaths",
        sa.Column("id", _ID, nullable=False),
        sa.Column("run_id", _ID, autoincrement=False, nullable=False),
        sa.Column("at", sa.String(length=24), nullable=False),
        sa.Column("rank", sa.Integer()),
        sa.Column("host", sa.Integer()),
        sa.Column("host_name", sa.Text()),
        sa.Column("device", sa.Text()),
        sa.Column("reason", sa.Text()),
        sa.Column("exit_code", sa.Integer()),
        sa.Column("signal", sa.Text()),
        sa.Column("exception", sa.Text()),
        sa.Column("message", sa.Text()),
        sa.Column("last_lines", sa.Text()),
        sa.Column("last_step", sa.BigInteger()),
        sa.Column("last_round", sa.Integer()),
        sa.Column("peak_rss_bytes", sa.BigInteger()),
        sa.Column("returned_samples", sa.BigInteger()),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_deaths_run_id_runs")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_deaths")),
        sqlite_autoincrement=True,
    )
    op.create_index(op.f("ix_deaths_run_id_id"), "deaths", ["run_id", "id"])
    op.create_table(
        "epochs",
        sa.Column("run_id", _ID, autoincrement=False, nullable=False),
        sa.Column("epoch", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("at", sa.String(length=24), nullable=False),
        sa.Column("seconds", sa.Double()),
        sa.Column("samples_accepted", sa.BigInteger()),
        sa.Column("samples_lost", sa.JSON()),
        sa.Column("batches", sa.BigInteger()),
        sa.Column("loss", sa.Double()),
        sa.Column("metrics", sa.JSON()),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_epochs_run_id_runs")),
        sa.PrimaryKeyConstraint("run_id", "epoch", name=op.f("pk_epochs")),
    )
    op.create_table(
        "events",
        sa.Column("id", _ID, nullable=False),
        sa.Column("run_id", _ID, autoincrement=False, nullable=False),
        sa.Column("at", sa.String(length=24), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("level", sa.String(length=16), nullable=False),
        sa.Column("text", sa.Text(), nullable=False),
        sa.Column("data", sa.JSON()),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_events_run_id_runs")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_events")),
        sqlite_autoincrement=True,
    )
    op.create_index(op.f("ix_events_run_id_id"), "events", ["run_id", "id"])
    op.create_table(
        "hosts",
        sa.Column("run_id", _ID, autoincrement=False, nullable=False),
        sa.Column("host", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("name", sa.Text()),
        sa.Column("address", sa.Text()),
        sa.Column("devices", sa.JSON()),
        sa.Column("versions", sa.JSON()),
        sa.Column("emulate_ms_per_batch", sa.Double()),
        sa.Column("state", sa.String(length=16)),
        sa.Column("reason", sa.Text()),
        sa.Column("joined_at", sa.String(length=24), nullable=False),
        sa.Column("left_at", sa.String(length=24)),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_hosts_run_id_runs")),
        sa.PrimaryKeyConstraint("run_id", "host", name=op.f("pk_hosts")),
    )
    op.create_table(
        "ranks",
        sa.Column("run_id", _ID, autoincrement=False, nullable=False),
        sa.Column("rank", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("host", sa.Integer()),
        sa.Column("local_rank", sa.Integer()),
        sa.Column("device", sa.Text()),
        sa.Column("emulate_ms_per_batch", sa.Double()),
        sa.Column("state", sa.String(length=16)),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_ranks_run_id_runs")),
        sa.PrimaryKeyConstraint("run_id", "rank", name=op.f("pk_ranks")),
    )
    op.create_table(
        "rounds",
        sa.Column("run_id", _ID, autoincrement=False, nullable=False),
        sa.Column("round", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("at", sa.String(length=24), nullable=False),
        sa.Column("epoch", sa.Integer()),
        sa.Column("attempt", sa.Integer()),
        sa.Column("global_step", sa.BigInteger()),
        sa.Column("samples", sa.BigInteger()),
        sa.Column("seconds", sa.Double()),
        sa.Column("reduce_seconds", sa.Double()),
        sa.Column("planned", sa.JSON()),
        sa.Column("realized", sa.JSON()),
        sa.Column("mass", sa.Double()),
        sa.Column("anchor", sa.Integer()),
        sa.Column("anchor_rank", sa.Integer()),
        sa.Column("ms_per_batch", sa.JSON()),
        sa.Column("compute_seconds", sa.JSON()),
        sa.Column("data_seconds", sa.JSON()),
        sa.Column("wait_seconds", sa.JSON()),
        sa.Column("load_seconds", sa.JSON()),
        sa.Column("divergence", sa.Double()),
        sa.Column("loss", sa.Double()),
        sa.Column("bytes_up", sa.BigInteger()),
        sa.Column("bytes_down", sa.BigInteger()),
        sa.Column("decision", sa.Text()),
        sa.Column("params_hash", sa.Text()),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_rounds_run_id_runs")),
        sa.PrimaryKeyConstraint("run_id", "round", name=op.f("pk_rounds")),
    )
    op.create_table(
        "scalars",
        sa.Column("id", _ID, nullable=False),
        sa.Column("run_id", _ID, autoincrement=False, nullable=False),
        sa.Column("at", sa.String(length=24), nullable=False),
        sa.Column("step", sa.BigInteger(), nullable=False),
        sa.Column("name", sa.String(length=200), nullable=False),
        sa.Column("value", sa.Double()),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_scalars_run_id_runs")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_scalars")),
        sqlite_autoincrement=True,
    )
    op.create_index(op.f("ix_scalars_run_id_name_id"), "scalars", ["run_id", "name", "id"])


def downgrade() -> None:
    for table in (
        "scalars",
        "rounds",
        "ranks",
        "hosts",
        "events",
        "epochs",
        "deaths",
        "checkpoints",
        "tokens",
        "runs",
    ):
        op.drop_table(table)
