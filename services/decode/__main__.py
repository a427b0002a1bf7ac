"""`python -m services.decode`: one decode worker."""

from services.decode.server import add_service
from services.decode.worker import DecodeLife
from services.runtime.process import run
from services.runtime.settings import load
from services.worker.main import Role, serve
from services.worker.settings import WorkerSettings

if __name__ == "__main__":
    settings = load(WorkerSettings, "python -m services.decode")
    role = Role("decode", DecodeLife, add_service)
    run(settings, role.name, lambda process: serve(process, settings, role))
