"""Budgets in, one frozen plan out. Room: decide."""

from penstock.planner.planner import Memory, Planned, find_plan, fits, least_budget, make_plan
from penstock.planner.search import QUICK, THOROUGH, Effort

__all__ = [
    "QUICK",
    "THOROUGH",
    "Effort",
    "Memory",
    "Planned",
    "find_plan",
    "fits",
    "least_budget",
    "make_plan",
]
