"""Rules for the dimension of parallelism that a process group serves: data, tensor, pipeline, context, expert, ...

DeviceMesh and Megatron-core describe their groups, and these rules read the description. An adapter or a user can
override them with ``OverlapMonitor.name_groups``. The rules are searched from top to bottom; the first match decides.
Add rules with ``overlap_callbacks.dimensions.rules.insert``.
"""

from __future__ import annotations

import re

from overlap_callbacks.analysis.name_rules import Rule

WORLD = "world"
UNKNOWN = "other"

rules: list[Rule] = [
    Rule("embedding", r"(?i)embedding"),
    Rule("expert", r"(?i)expert|\bep\b|_ep(_|$)|^ep(_|$)"),
    Rule("tensor+data", r"(?i)tensor_and_data"),
    Rule("tensor+context", r"(?i)tensor_and_context"),
    Rule("model", r"(?i)(?<!tensor_)(?<!pipeline_)(?<!expert_)model_parallel_group"),
    Rule("pipeline", r"(?i)pipeline|\bpp\b|_pp(_|$)|^pp(_|$)|_pipe(_|$)|stage"),
    Rule("tensor", r"(?i)tensor|\btp\b|_tp(_|$)|^tp(_|$)|_mp(_|$)|_model(_|$)"),
    Rule(
        "data", r"(?i)data_parallel|\bdp\b|_dp(_|$)|^dp(_|$)|fsdp|hsdp|ddp|shard|replicate|zero|_data(_|$)|_batch(_|$)"
    ),
    Rule("context", r"(?i)context|sequence|\bcp\b|_cp(_|$)|^cp(_|$)|\bsp\b|_sp(_|$)|_seq(_|$)"),
    Rule(WORLD, r"^default_pg$"),
]


def dimension_of(description: str) -> str:
    for label, pattern in rules:
        if re.search(pattern, description):
            return label
    return UNKNOWN
