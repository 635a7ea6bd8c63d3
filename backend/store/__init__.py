"""Persistence: one writer thread, many readers, a schema under Alembic (design section 10)."""

from backend.store.engine import sqlite_url
from backend.store.errors import LocalError, OpenError, StoreError
from backend.store.queries import Queries
from backend.store.store import Store
from backend.store.writer import WriterOptions

__all__ = ["LocalError", "OpenError", "Queries", "Store", "StoreError", "WriterOptions", "sqlite_url"]
