"""Operations in any order: tokens never change, and page counts always add up."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from penstock.kv import CacheFull, ContextError, NoSlot, Sequence
from tests.kv.caches import bytes_after, close, make_cache, random_tokens, read, write
from tests.kv.fake_cuda_driver import DriverSpace

SLOTS, PAGES, CONTEXT = 5, 14, 120


class CacheMachine(RuleBasedStateMachine):
    """A cache over the strict driver, and the tokens that each sequence must hold."""

    def __init__(self) -> None:
        super().__init__()
        self.space = DriverSpace()
        self.cache = make_cache(self.space, slots=SLOTS, pages=PAGES, context=CONTEXT)
        self.truth: dict[Sequence, torch.Tensor] = {}
        self.cropped: set[Sequence] = set()

    def choose(self, data: st.DataObject, resident: bool = True) -> Sequence:
        candidates = [s for s in self.truth if s.resident == resident]
        return candidates[data.draw(st.integers(0, len(candidates) - 1))]

    def some_resident(self) -> bool:
        return any(s.resident for s in self.truth)

    def some_preempted(self) -> bool:
        return any(not s.resident for s in self.truth)

    @rule(expect=st.integers(0, CONTEXT))
    def admit(self, expect: int) -> None:
        try:
            self.truth[self.cache.admit(expect=expect)] = random_tokens(0)
        except NoSlot:
            assert sum(s.resident for s in self.truth) == SLOTS

    @precondition(some_resident)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        donor = self.choose(data)
        if donor.length == 0:
            return
        tokens = data.draw(st.integers(1, donor.length))
        try:
            new = self.cache.admit(prefix=(donor, tokens))
        except NoSlot:
            return
        self.truth[new] = self.truth[donor][:tokens]
        self.cropped.add(new)  # after a prefix come the donor's tokens, until it writes

    @precondition(some_resident)
    @rule(data=st.data(), padded=st.booleans())
    def grow(self, data: st.DataObject, padded: bool) -> None:
        rows = [s for s in self.truth if s.resident and data.draw(st.booleans())] or [
            self.choose(data)
        ]
        rows = data.draw(st.permutations(rows))
        counts = [data.draw(st.integers(0, 50)) for _ in rows]
        kept = [data.draw(st.sampled_from([count, count // 2])) for count in counts]
        before = self.cache.stats
        try:
            self.cache.prepare(zip(rows, counts, strict=True))
        except (CacheFull, ContextError):
            assert self.cache.stats.needed_bytes == before.needed_bytes
            assert all(row.room == 0 for row in rows)
            return
        new = torch.stack([random_tokens(max(*counts, 1)) for _ in rows])
        if max(counts):
            write(self.cache, rows, new[:, : max(counts)])
        self.cache.advance(zip(rows, kept, strict=True))
        for i, (row, count, keep) in enumerate(zip(rows, counts, kept, strict=True)):
            self.truth[row] = torch.cat([self.truth[row], new[i, :keep]])
            if keep < count:
                self.cropped.add(row)

    @precondition(some_resident)
    @rule(data=st.data())
    def crop(self, data: st.DataObject) -> None:
        sequence = self.choose(data)
        left = data.draw(st.integers(0, sequence.length))
        self.cache._table.crop(sequence, left)
        self.truth[sequence] = self.truth[sequence][:left]
        self.cropped.add(sequence)

    @precondition(some_resident)
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        sequence = self.choose(data)
        moved = self.cache.preempt(sequence)
        assert moved == self.truth[sequence].numel() * 2
        self.cropped.discard(sequence)

    @precondition(some_preempted)
    @rule(data=st.data())
    def restore(self, data: st.DataObject) -> None:
        sequence = self.choose(data, resident=False)
        try:
            self.cache.restore(sequence)
        except (CacheFull, NoSlot):
            assert not sequence.resident

    @precondition(some_resident)
    @rule(data=st.data(), preempted=st.booleans())
    def finish(self, data: st.DataObject, preempted: bool) -> None:
        sequence = self.choose(data, resident=not (preempted and self.some_preempted()))
        self.cache.finish(sequence)
        del self.truth[sequence]

    @rule(pages=st.integers(SLOTS, 2 * PAGES))
    def resize(self, pages: int) -> None:
        before = self.cache.budget
        try:
            self.cache.resize(pages * self.space.page_nbytes)
        except CacheFull:
            assert self.cache.stats.live > pages
            assert self.cache.budget == before
        else:
            assert len(self.space.driver.alive) <= pages + self.cache.stats.blank

    @rule(data=st.data())
    def arrange_and_move(self, data: st.DataObject) -> None:
        rows = data.draw(st.permutations([s for s in self.truth if s.resident]))
        if rows:
            with self.cache.rows(rows, padded=False) as batch:
                assert [s.slot for s in rows] == list(range(batch.first, batch.first + len(rows)))

    @invariant()
    def every_sequence_holds_its_tokens(self) -> None:
        for sequence, tokens in self.truth.items():
            assert sequence.length == len(tokens)
            if sequence.resident:
                assert torch.equal(read(self.cache, sequence), tokens)

    @invariant()
    def nothing_foreign_follows_a_row(self) -> None:
        for sequence in self.truth:
            if sequence.resident and sequence not in self.cropped:
                with self.cache._table.exclusive():
                    assert not bytes_after(self.cache, sequence).any()

    @invariant()
    def pages_add_up(self) -> None:
        with self.cache._table.exclusive():
            self.cache._table.grower.wait_for(self.cache._table.page_table.slots)
            s = self.cache.stats
            assert s.free + s.live + s.ahead + s.kept == s.pages_total
            assert s.others == 0
            assert set(self.space.driver.mapped.values()) <= self.space.driver.alive
            idle = self.cache._table.pool.idle
            assert len(self.space.driver.alive) == s.pages_total - s.free + idle + s.blank
            one_each = sum(t.resident for t in self.truth) * s.page_nbytes
            assert 0 <= s.waste <= one_each

    def teardown(self) -> None:
        driver = self.space.driver
        close(self.cache)
        assert not driver.mapped
        assert not driver.alive
        assert not driver.ranges


def run(examples: int, steps: int) -> None:
    machine = CacheMachine.TestCase
    machine.settings = settings(
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        derandomize=examples < 100,  # the short run is the same every time
        suppress_health_check=list(HealthCheck),
    )
    machine().runTest()


def test_operations_in_any_order_keep_tokens_and_counts(one_thread: None) -> None:
    run(examples=20, steps=40)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_a_hundred_thousand_operations_keep_tokens_and_counts(one_thread: None) -> None:
    run(examples=1000, steps=100)
