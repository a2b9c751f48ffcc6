"""How long a step takes on a machine, and what bounds it. Room: decide.

`rates` reads the machine, `jobs` turns a schedule into timed work, `simulate` runs that work over
shared resources, `estimate` says what came out; a `stopwatch` only how long, for many in a row.
"""

from penstock.cost.estimate import Cost, estimate
from penstock.cost.peaks import PHASES, phase_peaks
from penstock.cost.rates import Rates
from penstock.cost.stopwatch import Stopwatch

__all__ = ["PHASES", "Cost", "Rates", "Stopwatch", "estimate", "phase_peaks"]
