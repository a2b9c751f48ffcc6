"""The cost model: how long a step takes on a machine, and what limits it.

`rates` reads speeds from the machine file, `jobs` turns a schedule into timed jobs, `simulation`
runs those jobs over shared resources, and `estimate` summarizes the result. `StepTimer` computes
only the time, for many placements.
"""

from penstock.planner.cost.estimate import Cost, StepTimer, estimate
from penstock.planner.cost.peaks import PHASES, phase_peaks
from penstock.planner.cost.rates import Rates

__all__ = ["PHASES", "Cost", "Rates", "StepTimer", "estimate", "phase_peaks"]
