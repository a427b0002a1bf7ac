"""What both kinds of worker are made of: settings, assembly, the engine thread, attempts, token events, heartbeats."""
