"""Working memory of sizes that were not asked for lies on a line between two that were."""

from dataclasses import replace

from penstock.model.inventory import Inventory
from penstock.plan.memory_interpolation import interpolated
from penstock.plan.working_memory import PartMemory, WorkingMemory
from penstock.plan.workload import Workload
from tests.support.models import llama, work

MODEL = llama("tiny", 256, 1024, 2, 256, 64, 8192, False)
BASE = work(MODEL, 4096, 8, micro_batch=2)


class Affine:
    """A source that counts what it is asked for."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def __call__(self, inventory: Inventory, workload: Workload, /) -> WorkingMemory:
        tokens = workload.numerics.micro_batch * workload.context
        self.asked.append(tokens)
        return WorkingMemory(
            parts=(
                PartMemory(name="layer", forward=100 + 10 * tokens, backward=500 + 30 * tokens),
                PartMemory(name="head", forward=7000, backward=9000),
            ),
            inputs=28 * tokens,
            arguments=512 * tokens,
            origin="traced",
        )


def sized(context: int, micro_batch: int) -> Workload:
    numerics = replace(BASE.numerics, micro_batch=micro_batch)
    return replace(BASE, context=context, numerics=numerics)


def test_other_sizes_need_two_questions_in_all() -> None:
    source = Affine()
    between = interpolated(source, BASE)

    for context, micro_batch in (
        (2048, 2),
        (2048, 4),
        (1024, 8),
        (4096, 1),
        (8192, 1),
        (8192, 2),
        (64, 1),
    ):
        found = between(MODEL, sized(context, micro_batch))
        assert found == Affine()(MODEL, sized(context, micro_batch))
    assert set(source.asked) == {2 * 4096, 2 * 1024}


def test_the_size_itself_is_exact_and_needs_one_question() -> None:
    source = Affine()

    assert interpolated(source, BASE)(MODEL, replace(BASE, batch=16)) == source(MODEL, BASE)
    assert set(source.asked) == {2 * 4096}
