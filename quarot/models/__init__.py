"""Real models that need no hub."""
