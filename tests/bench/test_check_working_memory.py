"""The check of working memory on the GPU, run without one."""

from bench.check_working_memory import run_case, summarize
from bench.fit_cases import TINY, draw_case


def test_a_case_is_compared_part_by_part() -> None:
    record = run_case(draw_case(7, 3, limits=TINY), "cpu")

    parts = record["parts"]
    assert {part["phase"] for part in parts} == {"forward", "backward"}
    assert {part["packed"] for part in parts} == {False, True}
    assert all(part["measured"] == part["traced"] > 0 for part in parts)


def test_a_summary_counts_what_exceeds_the_trace() -> None:
    names = ("embed", "layer", "head")
    parts = [
        {"name": name, "phase": "forward", "packed": False, "traced": 100, "measured": measured}
        for name, measured in zip(names, (90, 110, 104), strict=True)
    ]
    case = {"number": 1, "family": "llama"}
    record = {"case": case, "parts": parts, "estimated": 200, "trace_seconds": 1.0,
              "compiled": True}  # fmt: skip
    text = summarize([record, {"case": case, "error": "no"}, {"case": case, "skipped": "no"}])

    assert text.startswith("1 cases compared, 1 skipped, 1 failed")
    assert "layer compiled forward" in text
    assert "most 1.100; above 1.00: 1, above 1.05: 1" in text
    assert "most 0.550" in text  # 110 bytes where 200 were estimated
