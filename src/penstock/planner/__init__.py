"""The planner: from budgets to one frozen plan."""

from penstock.planner.planner import (
    PlannerCache,
    PlanResult,
    find_plan,
    fits,
    least_budget,
    make_plan,
    quick_step_seconds,
)
from penstock.planner.search import QUICK, THOROUGH, SearchEffort

__all__ = [
    "QUICK",
    "THOROUGH",
    "PlanResult",
    "PlannerCache",
    "SearchEffort",
    "find_plan",
    "fits",
    "least_budget",
    "make_plan",
    "quick_step_seconds",
]
