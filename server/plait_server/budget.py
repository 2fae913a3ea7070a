"""A bound on memory: who can't have its bytes now waits, and so does its sender."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class ByteBudget:
    """At most `limit` bytes are lent out at once, in the order of asking. For one event loop."""

    def __init__(self, limit: int) -> None:
        self._free = limit
        self._limit = limit
        self._turn = asyncio.Lock()
        self._returned = asyncio.Condition()

    @asynccontextmanager
    async def lend(self, size: int) -> AsyncIterator[None]:
        """Waits until `size` bytes are free; they are free again when the block ends."""
        size = min(size, self._limit)
        async with self._turn, self._returned:
            await self._returned.wait_for(lambda: self._free >= size)
            self._free -= size
        try:
            yield
        finally:
            async with self._returned:
                self._free += size
                self._returned.notify_all()
