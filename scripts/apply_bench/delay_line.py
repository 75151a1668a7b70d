"""Lines to ports of this machine on which every byte is under way for a while, as on a long wire of any width.

A connection takes what TCP needs for it: the server sees it, and what was sent meanwhile, after one and a half round
trips. Not shown: TCP's slow start, which makes long answers slower on a real line, for everyone.
"""

from __future__ import annotations

import asyncio
import threading


class DelayLines:
    """Lines to many ports, run by one thread. `round_trip`: seconds, half of them each way.

    Attributes: up, down: bytes from and to the clients so far. turns: how often a client spoke after its server had.
    """

    def __init__(self, round_trip: float) -> None:
        self._round_trip = round_trip
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._servers: list[asyncio.Server] = []
        self._tasks: set[asyncio.Task] = set()
        self.up = self.down = self.turns = 0
        self._thread.start()

    def to(self, port: int) -> int:
        """The port of a new line to `port`."""
        return asyncio.run_coroutine_threadsafe(self._listen(port), self._loop).result()

    def close(self) -> None:
        """End every connection, and take no more."""
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def counted(self) -> dict[str, int]:
        """{"up", "down", "turns"} since the last call."""
        counts = {"up": self.up, "down": self.down, "turns": self.turns}
        self.up = self.down = self.turns = 0
        return counts

    async def _listen(self, port: int) -> int:
        async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            self._tasks.add(asyncio.current_task())
            await self._carry(port, reader, writer)
            self._tasks.discard(asyncio.current_task())

        server = await asyncio.start_server(carry, "127.0.0.1", 0)
        self._servers.append(server)
        return server.sockets[0].getsockname()[1]

    async def _carry(self, port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connected = self._loop.time() + 1.5 * self._round_trip
        await asyncio.sleep(1.5 * self._round_trip)
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", port)
        spoken = {"last": "down"}
        try:
            await asyncio.gather(
                self._one_way("up", reader, far_writer, spoken, connected),
                self._one_way("down", far_reader, writer, spoken, 0.0),
            )
        except (ConnectionError, asyncio.CancelledError):
            pass  # one side is gone, or the lines are closed: both ends are closed below
        finally:
            far_writer.close()
            writer.close()

    async def _one_way(
        self,
        way: str,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        spoken: dict[str, str],
        connected: float,
    ) -> None:
        under_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()

        async def take() -> None:
            data = b"-"
            while data:
                data = await reader.read(1 << 16)
                arrives = self._loop.time() + self._round_trip / 2
                if data:
                    setattr(self, way, getattr(self, way) + len(data))
                    self.turns += way == "up" and spoken["last"] == "down"
                    spoken["last"] = way
                under_way.put_nowait((max(arrives, connected), data))

        taking = asyncio.create_task(take())
        try:
            while True:
                arrives, data = await under_way.get()
                await asyncio.sleep(arrives - self._loop.time())
                if not data:
                    break
                writer.write(data)
                await writer.drain()
            if writer.can_write_eof():
                writer.write_eof()
            await taking
        finally:
            taking.cancel()

    async def _end(self) -> None:
        for server in self._servers:
            server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
