"""The plan: what is stored where, and the order of a step."""
