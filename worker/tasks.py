"""Several asyncio tasks that live and end together."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any


async def first_to_end(*jobs: Coroutine[Any, Any, None]) -> None:
    """Run all until one raises, which is the only way any of them ends; raise that."""
    tasks = [asyncio.create_task(job) for job in jobs]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:  # in the order of their weight: what was said goes before what was not heard
            if task in done:
                task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
