"""Alembic's environment. The store runs it with its own connection; the command line names a database:

MARCHLINE_DATABASE_URL=sqlite:///var/marchline.db alembic revision --autogenerate -m "..."
"""

from __future__ import annotations

import os
from pathlib import Path

from alembic import context
from sqlalchemy import Connection

from backend.store.engine import FileLock, Role, is_sqlite, make_engine, parse_url, where_of
from backend.store.tables import metadata


def migrate(connection: Connection) -> None:
    """Run the migrations in the transaction of the connection's owner: both change or neither."""
    context.configure(connection=connection, target_metadata=metadata, render_as_batch=True, transactional_ddl=True)
    with context.begin_transaction():
        context.run_migrations()


def migrate_named_database() -> None:
    """The command line's way: under the same lock as a controller, so never beneath a running one."""
    url = parse_url(os.environ.get("MARCHLINE_DATABASE_URL", ""))
    if context.is_offline_mode():
        context.configure(
            dialect_name=url.get_backend_name(),
            target_metadata=metadata,
            literal_binds=True,
            transactional_ddl=True,
        )
        with context.begin_transaction():
            context.run_migrations()
        return
    lock = FileLock(Path(where_of(url))) if is_sqlite(url) else None
    engine = make_engine(url, Role.MIGRATION)
    try:
        with engine.begin() as connection:
            migrate(connection)
    finally:
        engine.dispose()
        if lock is not None:
            lock.release()


given = context.config.attributes.get("connection")
if given is not None:
    migrate(given)
else:
    migrate_named_database()
