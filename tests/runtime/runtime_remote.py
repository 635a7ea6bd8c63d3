"""A controller in a process of its own, for scripted hosts: to be killed, starved and started again, without torch."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

from e2e.stage import Stage, stage
from runtime_site import Site

from wire.session import Channel, join_secret


class Remote:
    """Where scripted hosts dial when the controller is another process: as much of a ``Site`` as they need."""

    def __init__(self, marchline: Stage) -> None:
        self.port = int(marchline.url.rpartition(":")[2])
        self.join_secret = join_secret((marchline.data_dir / "join.token").read_text().strip())

    def url(self, channel: Channel) -> str:
        return f"ws://127.0.0.1:{self.port}/ws/{channel.name.lower()}"


@asynccontextmanager
async def remote(tmp_path: Path, **options: Any) -> AsyncIterator[tuple[Stage, Site]]:
    """A controller beside this event loop; its ``Stage`` blocks, so it is asked in threads."""
    context = stage(tmp_path, **options)
    marchline = await asyncio.to_thread(context.__enter__)
    marchline.client.headers["Connection"] = "close"  # the test itself takes no lasting place
    try:
        yield marchline, cast(Site, Remote(marchline))
    finally:
        await asyncio.to_thread(context.__exit__, None, None, None)
