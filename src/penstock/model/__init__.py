"""The model: its config, its tensors, and how it is cut into blocks."""
