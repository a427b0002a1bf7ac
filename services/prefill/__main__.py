"""`python -m services.prefill`: one prefill worker."""

from services.prefill.server import add_service
from services.prefill.worker import PrefillLife
from services.runtime.process import run
from services.runtime.settings import load
from services.worker.main import Role, serve
from services.worker.settings import WorkerSettings

if __name__ == "__main__":
    settings = load(WorkerSettings, "python -m services.prefill")
    role = Role("prefill", PrefillLife, add_service)
    run(settings, role.name, lambda process: serve(process, settings, role))
