"""What Megatron-core sends in a step of each job, worked out by hand."""

from __future__ import annotations

from tests.integrations.megatron_jobs import BATCH, SEQUENCE, VOCABULARY

_HIDDEN, _LAYERS, _FLOAT = 32, 4, 4
_ACTIVATION = SEQUENCE * BATCH * _HIDDEN * _FLOAT
_TOKENS = SEQUENCE * BATCH * _FLOAT
# Two norms with bias; attention's projections of 3h and h, the MLP's of 4h and h, all with bias.
_LAYER = 2 * 2 * _HIDDEN + (3 + 1 + 4 + 4) * _HIDDEN**2 + (3 + 1 + 4 + 1) * _HIDDEN
# The word and position embeddings, the layers, the last norm; the output layer shares the word embedding.
_PARAMETERS = (VOCABULARY + SEQUENCE) * _HIDDEN + _LAYERS * _LAYER + 2 * _HIDDEN

# The maximum, the predicted logit and the sum of the loss, for each token; on one rank too.
_LOSS = (3, 3 * _TOKENS, 3 * _TOKENS)
_NORM = (1, _FLOAT, _FLOAT)

# By job: (operator, dimension, ranks of the group) -> messages, bytes read, bytes written, of rank 0.
BYTES: dict[str, dict[tuple[str, str, int], tuple[int, int, int]]] = {
    "dp": {
        ("allreduce_coalesced_", "data", 2): (8, _FLOAT * _PARAMETERS, _FLOAT * _PARAMETERS),
        ("allreduce_", "tensor", 1): _LOSS,
        ("allreduce_", "model", 1): _NORM,
    },
    "tp": {
        # The embedding's output; in each layer attention's and the MLP's output, and their inputs' gradients; the
        # gradient of the output layer's input; the loss.
        ("allreduce_", "tensor", 2): (
            1 + 4 * _LAYERS + 1 + 3,
            (2 + 4 * _LAYERS) * _ACTIVATION + 3 * _TOKENS,
            (2 + 4 * _LAYERS) * _ACTIVATION + 3 * _TOKENS,
        ),
        ("allreduce_", "model", 2): _NORM,
    },
    "tp_sequence_parallel": {
        # In each layer two gathers forward, and backward two of gradients and two of inputs; for the output layer one
        # each of the input, forward and backward; one of the embedding's gradient.
        ("_allgather_base_", "tensor", 2): (
            6 * _LAYERS + 3,
            (6 * _LAYERS + 3) * _ACTIVATION // 2,
            (6 * _LAYERS + 3) * _ACTIVATION,
        ),
        ("_reduce_scatter_base_", "tensor", 2): (
            4 * _LAYERS + 1,
            (4 * _LAYERS + 1) * _ACTIVATION,
            (4 * _LAYERS + 1) * _ACTIVATION // 2,
        ),
        ("allreduce_", "model", 2): _NORM,
    },
    "pp": {
        ("send", "pipeline", 2): (4, 4 * _ACTIVATION, 0),
        ("recv_", "pipeline", 2): (4, 0, 4 * _ACTIVATION),
        ("allreduce_", "embedding", 2): (1, _FLOAT * VOCABULARY * _HIDDEN, _FLOAT * VOCABULARY * _HIDDEN),
        ("allreduce_", "model", 2): _NORM,
    },
}

# Messages alone, of rank 0. Buckets of gradients over one rank, as tensor and pipeline jobs have them, are sent too.
MESSAGES = {
    "dp": {"allreduce_coalesced_": 8, "allreduce_": 4},
    "dp_distributed_optimizer": {
        "reduce_scatter_tensor_coalesced_": 8,
        "allgather_into_tensor_coalesced_": 8,
        "allreduce_": 4,
    },
    "tp": {"allreduce_": 22, "allreduce_coalesced_": 5},
    "tp_sequence_parallel": {
        "_allgather_base_": 27,
        "_reduce_scatter_base_": 17,
        "allreduce_": 6,
        "allreduce_coalesced_": 5,
    },
    "pp": {"send": 4, "recv_": 4, "allreduce_": 2, "allreduce_coalesced_": 4},
    "pp_interleaved": {"send": 12, "recv_": 12, "allreduce_": 2, "allreduce_coalesced_": 3},
    "ep": {"alltoall_base_": 24, "_allgather_base_": 4, "allreduce_": 5, "allreduce_coalesced_": 11},
    # The first stage has no loss: per micro-batch the embedding's reduction and four of each of two layers.
    "tp_pp": {"allreduce_": 20, "send": 2, "recv_": 2, "allreduce_coalesced_": 3},
    "tp_dp": {
        "_allgather_base_": 27,
        "_reduce_scatter_base_": 17,
        "allreduce_": 6,
        "reduce_scatter_tensor_coalesced_": 5,
        "allgather_into_tensor_coalesced_": 5,
    },
}
