"""The parts of `bench.serving`: what is sent, when, over which connections, and what comes of it."""
