"""Other systems' placements and steps, for comparison. Room: decide.

Nothing of Penstock uses these to plan; they are what its plans are measured against, timed by the
same simulation on the same machine.
"""
