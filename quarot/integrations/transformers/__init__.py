"""The only code that knows the hooks of transformers: loading, saving, attention, masks and generation."""
