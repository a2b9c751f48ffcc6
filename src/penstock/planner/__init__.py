"""Budgets in, one frozen plan out. Room: decide."""

from penstock.planner.planner import (
    PlannerCache,
    PlanResult,
    find_plan,
    fits,
    least_budget,
    make_plan,
)
from penstock.planner.search import QUICK, THOROUGH, SearchEffort

__all__ = [
    "QUICK",
    "THOROUGH",
    "SearchEffort",
    "PlannerCache",
    "PlanResult",
    "find_plan",
    "fits",
    "least_budget",
    "make_plan",
]
