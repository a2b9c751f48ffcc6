"""How long a step takes on a machine, and what bounds it. Room: decide.

`rates` reads the machine, `jobs` turns a schedule into timed work, `simulate` runs that work over
shared resources, `estimate` says what came out; a `stopwatch` only how long, for many in a row.
"""

from penstock.planner.cost.estimate import Cost, StepTimer, estimate
from penstock.planner.cost.peaks import PHASES, phase_peaks
from penstock.planner.cost.rates import Rates

__all__ = ["PHASES", "Cost", "Rates", "StepTimer", "estimate", "phase_peaks"]
