"""All of it on one machine: the `pdserve` command, and the supervisor behind it, the tests and the demo."""
