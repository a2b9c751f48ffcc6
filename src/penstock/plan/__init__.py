"""The plan: what is stored where, and the schedule of a step."""
