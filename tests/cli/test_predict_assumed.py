"""``overlap predict`` without a model or a layout."""

from __future__ import annotations

import json
from typing import Any

from tests.commands import invoke


def predict(*arguments: str) -> Any:
    result = invoke("predict", *arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_where_no_job_is_given_one_is_assumed_that_fits_and_communicates_and_it_says_so() -> None:
    for given, layout in (
        ((), "TP 2 x DP 4"),
        (("--model", "llama2-13b"), "TP 8 x DP 1"),
        (("--layout", "fsdp2"), "TP 1 x DP 8"),
    ):
        found = predict(*given)
        assert (found["world_size"], found["memory_bytes"] <= found["device_bytes"]) == (8, True)
        assert found["messages"]
        assert f"assumed, as no layout is given: 8 ranks, {layout}" in found["notes"]
        assert ("assumed, as no model is given: gpt3-6.7b (--model)" in found["notes"]) is ("--model" not in given)
    assert not any(["no layout" in note for note in predict("--model", "gpt3-6.7b", "--pp", "2")["notes"]])
