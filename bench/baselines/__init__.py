"""Models of other systems' placements and steps, for comparison.

Penstock does not use these to plan. They are simulated on the same machine with the same cost
model, so that its plans can be compared with them.
"""
