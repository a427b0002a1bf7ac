"""Servers that pdserve is compared with: how each is made, started at its best settings, measured, and ended."""
