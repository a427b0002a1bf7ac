"""How a process lives: settings, life cycle, admin endpoint, logs, where model files lie."""
