"""Everything that prints a number. Each module is a command: `python -m bench.NAME --out DIR --quick --check`."""
