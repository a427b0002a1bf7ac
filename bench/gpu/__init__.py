"""The parts of `bench.gpu_check`: each takes a device and returns its figures."""
