"""What the transfer of blocks tells Prometheus."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)

PULLED_BYTES = Counter("pdserve_kvtransfer_pulled_bytes_total", "bytes pulled and verified", ["transport"])
PULLED_BLOCKS = Counter("pdserve_kvtransfer_pulled_blocks_total", "blocks pulled and verified", ["transport"])
PULL_SECONDS = Histogram("pdserve_kvtransfer_pull_seconds", "posting a pull to its last byte", buckets=_SECONDS)
VERIFY_SECONDS = Histogram("pdserve_kvtransfer_verify_seconds", "checksums of one pull, taken again", buckets=_SECONDS)
CONTACT_SECONDS = Histogram(
    "pdserve_kvtransfer_first_contact_seconds", "connecting to a peer to the first byte read from it", buckets=_SECONDS
)
VERIFY_FAILURES = Counter("pdserve_kvtransfer_verify_failures_total", "pulled blocks whose checksum was wrong")
PULL_FAILURES = Counter("pdserve_kvtransfer_pull_failures_total", "pulls that failed", ["reason"])
IN_FLIGHT_BYTES = Gauge("pdserve_kvtransfer_in_flight_bytes", "bytes of posted pulls that are not settled")
QUARANTINED = Gauge("pdserve_kvtransfer_quarantined_transfers", "abandoned pulls whose bytes may still land")
LATE_BLOCKS = Counter("pdserve_kvtransfer_late_blocks_total", "blocks of abandoned pulls whose bytes landed after all")
LEASES_OPEN = Gauge("pdserve_kvtransfer_leases_open", "offers whose blocks a peer may read")
LEASES_ENDED = Counter("pdserve_kvtransfer_leases_ended_total", "leases by how they ended", ["outcome"])
TRANSPORT_INFO = Gauge("pdserve_kvtransfer_transport_info", "1 for the path that carries blocks", ["transport", "path"])
DIRECTORY_MEMBERS = Gauge("pdserve_kvtransfer_directory_members", "workers that have joined", ["role"])
DIRECTORY_KEYS = Gauge("pdserve_kvtransfer_directory_keys", "distinct prefix blocks that some worker holds")
DIRECTORY_CONNECTED = Gauge("pdserve_kvtransfer_directory_connected", "1 while this worker is joined to the directory")
