"""The machine: its memory, GPUs and storage, how fast they are, and how they are discovered."""
