"""On a GPU, experts give the same bits under every plan, and the numbers of plain loops."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.model.experts import _grouped_mm, _grouped_outer
from penstock.model.meta_model import weight_dtype
from penstock.roles import STATE, Role
from tests.equivalence.test_cuda import PLANS
from tests.support import engines

pytestmark = pytest.mark.gpu

STEPS = 6

COMPILED = {"compiled": True, "loss_kernel": "fused", "attention": "varlen"}


def train(family: str, name: str, disk: Path, **changes: Any) -> list[torch.Tensor]:
    sizes: dict[str, Any] = {"hidden_size": 64, "initializer_range": 0.2}
    if family != "deepseek_v3":
        sizes |= {"head_dim": 16, "output_router_logits": True, "router_aux_loss_coef": 0.5}
    config = engines.tiny_config(family, **sizes)
    spots, how = PLANS[name]
    work = engines.workload(context=32, **changes)
    model = engines.inventory(config)
    plan = engines.make_plan_of(model, work, spots, disk=disk, **how)
    plain = engines.plain_model(config, weight_dtype(work.dtype))
    engine = engines.make_engine(config, plan, model, plain, device="cuda", optimizer={"lr": 1e-3})
    found = []
    for batch in engines.batches(STEPS, work, config.vocab_size):
        found.append(engine.step(batch))
        found.append(torch.tensor(engine.grad_norm))
    load = engine.expert_load()
    assert load is not None
    assert load.largest >= 1 >= load.smallest
    engine.finish()
    for block in model.blocks:
        for tensor in block.tensors:
            for role in (Role.WEIGHT, *filter(engine.access.formats.has, STATE)):
                found.append(torch.cat([p.clone() for p in engine.access.parts(tensor.name, role)]))
    engine.close()
    return found


@pytest.mark.parametrize(
    ("family", "how"),
    [
        pytest.param("olmoe", {}, id="olmoe, eager"),
        pytest.param("olmoe", COMPILED, id="olmoe, compiled"),
        pytest.param("olmoe", COMPILED | {"dtype": "fp32"}, id="olmoe, compiled, fp32"),
        pytest.param("olmoe", COMPILED | {"mlp_tile": 40}, id="olmoe, compiled, tiles"),
        pytest.param("gpt_oss", {"compiled": True}, id="gpt_oss, compiled, torch's attention",
                     marks=pytest.mark.long),
        pytest.param("gpt_oss", COMPILED, id="gpt_oss, compiled"),
        pytest.param("deepseek_v3", {"compiled": True}, id="deepseek_v3, compiled"),
    ],
)  # fmt: skip
def test_experts_give_the_same_bits_under_every_plan(
    family: str, how: dict[str, Any], tmp_path: Path
) -> None:
    wanted = train(family, "resident", tmp_path, **how)
    for name in ("dram", "split", "all on disk", "two rounds"):
        found = train(family, name, tmp_path, **how)
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True)), name


def test_grouped_products_equal_a_loop_over_groups_with_idle_ones() -> None:
    torch.manual_seed(0)
    ends = torch.tensor([0, 40, 40, 300, 512, 512], device="cuda", dtype=torch.int32)
    rows = torch.randn(512, 256, device="cuda").bfloat16()
    other = torch.randn(512, 128, device="cuda").bfloat16()
    weight = torch.randn(6, 256, 128, device="cuda").bfloat16()

    product, outer = _grouped_mm(rows, weight, ends), _grouped_outer(rows, other, ends)

    start = 0
    for group, stop in enumerate(ends.tolist()):
        part = slice(start, stop)
        expected = rows[part].double() @ weight[group].double()
        assert torch.allclose(product[part].double(), expected, rtol=1e-2, atol=0.2)
        expected = rows[part].double().mT @ other[part].double()
        assert torch.allclose(outer[group].double(), expected, rtol=1e-2, atol=0.3)
        start = stop
    assert float(outer[[0, 2, 5]].abs().max()) == 0
