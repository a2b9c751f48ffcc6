"""The machine: what it has, how fast it is, and where that was read."""
