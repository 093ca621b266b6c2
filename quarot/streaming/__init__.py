"""From a checkpoint on disk to a quantised one, one decoder layer in memory at a time."""
