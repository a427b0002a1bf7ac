"""The admin endpoint over real HTTP."""

from __future__ import annotations

import asyncio
import json

import httpx2

from services.runtime.admin import AdminServer


def test_pages() -> None:
    async def body() -> None:
        missing: list[str] = ["no model yet"]
        server = AdminServer("127.0.0.1", 0, lambda: missing[0] if missing else None)

        async def view() -> object:
            return {"free": 3}

        server.debug("blocks", view)
        port = await server.start()
        async with httpx2.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
            refused = await client.get("/ready")
            assert (refused.status_code, refused.text) == (503, "no model yet")
            missing.clear()
            assert (await client.get("/ready")).status_code == 200
            assert (await client.get("/live")).status_code == 200
            assert "python_info" in (await client.get("/metrics")).text
            assert json.loads((await client.get("/debug/blocks")).text) == {"free": 3}
            assert (await client.get("/debug/none")).status_code == 404
            assert (await client.post("/live")).status_code == 405
        await server.stop()
        await server.stop()

    asyncio.run(body())
