"""BLOCKS FROM ONE MEMORY TO ANOTHER.

Inside a worker this is a library: `Connector` joins a `Transport` (who moves bytes) with leases (how long they stay
readable) and gRPC between workers (who may read what, when). As a process (`python -m services.kvtransfer`) it is the
directory in which workers find one another.
"""
