"""A real controller with a real store behind the real application, called over ASGI."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from api_harness import BASE, JOB, Api
from starlette.testclient import TestClient

from backend.api.app import create_app
from backend.runtime.controller import Controller
from backend.runtime.settings import Settings
from backend.store import Store, sqlite_url


@pytest.fixture(scope="session")
def migrated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty database of today's schema, to be copied: migrating takes longer than most tests."""
    path = tmp_path_factory.mktemp("migrated") / "marchline.sqlite3"
    Store.open(sqlite_url(path)).close()
    return path


@pytest.fixture
def settings(tmp_path: Path, migrated: Path) -> Settings:
    job_dir = tmp_path / "jobs"
    job_dir.mkdir()
    (job_dir / "digits.py").write_text(JOB)
    (tmp_path / "var").mkdir()
    shutil.copy(migrated, tmp_path / "var/marchline.sqlite3")
    return Settings(data_dir=tmp_path / "var", job_dir=job_dir, allowed_hosts=("march.example",))


@pytest.fixture
def frontend_dir(tmp_path: Path) -> Path:
    """A dashboard in small, so that the tests need no npm."""
    folder = tmp_path / "frontend"
    (folder / "app").mkdir(parents=True)
    (folder / "node_modules/lib").mkdir(parents=True)
    (folder / "index.html").write_text('<!doctype html><script type="importmap">\n{"imports": {}}\n</script>')
    (folder / "app/main.js").write_text("export const x = 1;\n")
    (folder / "app/icon.svg").write_text("<svg/>")
    (folder / "node_modules/lib/lib.mjs").write_text("export default 1;\n")
    (folder / "vendor.json").write_text(
        '{"lib.js": "node_modules/lib/lib.mjs", "gone.js": "node_modules/gone.js", "out.js": "../secret.js"}'
    )
    (tmp_path / "secret.js").write_text("secret")
    return folder


@pytest.fixture
def api(settings: Settings, frontend_dir: Path) -> Iterator[Api]:
    controller = Controller(settings, Store.open(sqlite_url(settings.data_dir / "marchline.sqlite3")))
    app = create_app(controller, frontend_dir)
    with TestClient(app, base_url=BASE, raise_server_exceptions=False) as client:
        yield Api(client, controller)
