"""`python -m services.kvtransfer`: the directory. It holds no KV and moves none; workers go on while it is down."""

from __future__ import annotations

from services.kvtransfer.directory_server import DirectoryServicer
from services.runtime import log
from services.runtime.admin import AdminServer
from services.runtime.process import Process, run
from services.runtime.settings import ProcessSettings, load
from services.wire.pb import directory_pb2_grpc
from services.wire.rpc import RpcServer

ROLE = "kvtransfer"
GRACE_S = 0.5  # Join streams never end by themselves; members find the next directory as soon as they break


async def serve(process: Process, settings: ProcessSettings) -> None:
    """Listens, is ready at once, and leaves when told to."""
    directory, rpc = DirectoryServicer(), RpcServer()
    directory_pb2_grpc.add_DirectoryServiceServicer_to_server(directory, rpc.server)
    admin = AdminServer(settings.host, settings.admin_port, process.ready)
    admin.debug("members", directory.view)
    admin_port = await admin.start()
    port = await rpc.start(settings.host, settings.port)
    await rpc.set_serving(True)
    process.waits_for = None
    log.get_logger().info("ready", address=f"{settings.advertised_host}:{port}", admin_port=admin_port)
    await process.draining.wait()
    await rpc.set_serving(False)
    await rpc.stop(GRACE_S)
    await admin.stop()


if __name__ == "__main__":
    _settings = load(ProcessSettings, "python -m services.kvtransfer")
    run(_settings, ROLE, lambda process: serve(process, _settings))
