"""A sample of the cases of `file_faults.py`."""

from __future__ import annotations

import errno
from collections.abc import Iterator

import pytest
import torch

from tests.campaign.file_faults import FileFaults


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FileFaults]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the bits depend on the number of threads
    yield FileFaults(tmp_path_factory.mktemp("faults"))
    torch.set_num_threads(threads)


@pytest.mark.parametrize(
    ("function", "place", "code", "once"),
    [
        ("fdatasync", "disk/", errno.EIO, False),
        ("fsync", "out/.checkpoint-000001", errno.EIO, True),
        ("rename", "out/.checkpoint-000003", errno.EIO, False),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in (
                ("write", "out/.run.yaml", errno.EROFS, False),
                ("pwrite", "out/.checkpoint-000002", errno.ENOSPC, True),
                ("rmdir", "disk/", errno.EROFS, True),  # left an empty directory in a campaign
            )
        ),
    ],
)
def test_a_failed_call_ends_in_success_or_one_line_and_loses_nothing(
    faults: FileFaults, function: str, place: str, code: int, once: bool
) -> None:
    calls = faults.calls("train")
    number = next(
        number
        for number, (call, path) in enumerate(calls, start=1)
        if call == function and path.startswith(place)
    )
    outcome = faults.run_case(number, code, once=once)
    assert outcome.function == function
    assert not outcome.problem, f"{outcome}\n{outcome.message}"
    if code == errno.EIO and once:
        assert outcome.code == 0
        assert "1 I/O retry on" in outcome.message
