"""What a report says was planned is what the plan said."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from penstock.machine import discovery
from penstock.machine.probe_cache import save_probe
from penstock.observe import engine_events
from penstock.plan.budget import Budget
from penstock.planner import QUICK, make_plan
from penstock.units import GiB
from tests.support.machines import machine
from tests.support.models import llama, work


def test_what_was_planned_is_told_by_the_speeds_it_was_planned_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of the kept probe, and of compiled layers where they are."""
    probed = machine(cards=0)
    bare = replace(probed, nodes=tuple(replace(n, rates=()) for n in probed.nodes), transfers=())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    save_probe(probed)
    monkeypatch.setattr(discovery, "discover", lambda: bare)
    model = llama("3m", 256, 768, 3, 256, 64, 2048, False)
    for compiled in (False, True):
        workload = work(model, 64, 8)
        numerics = replace(workload.numerics, compiled=compiled)
        workload = replace(workload, numerics=numerics)
        budget = Budget(hbm=2 * GiB, dram=GiB)
        planned = make_plan(model, workload, budget, probed, effort=QUICK)
        where = SimpleNamespace(where=torch.device("cuda"))
        passed: Any = SimpleNamespace(plan=planned.plan, inventory=model, device=where)

        told = engine_events._predicted_cost(passed)

        assert told == (planned.cost.step_seconds, planned.cost.bound_by)
