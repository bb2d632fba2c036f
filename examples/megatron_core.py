"""Megatron-core with tensor, pipeline and data parallelism. Only the line with `attach` is added for the library.

torchrun --nproc-per-node 2 examples/megatron_core.py --tp 1 --pp 2
torchrun --nproc-per-node 8 examples/megatron_core.py --tp 2 --pp 2 --steps 100  # all three, one window
torchrun --nproc-per-node 8 examples/megatron_core.py --model gpt3-6.7b --tp 4 --pp 2 --micro-batches 16

Data parallelism uses the ranks that tensor and pipeline parallelism leave. Megatron-core is made for GPUs.
``pretend_cuda`` below lets it run on a CPU, for trying things out only.
"""

import argparse
import contextlib
import logging
import os

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig
from models import MODELS

from overlap_callbacks.integrations.megatron import attach

logging.basicConfig(level=logging.WARNING, format="%(message)s")
logging.getLogger("overlap_callbacks").setLevel(logging.INFO)  # shows one line per window

LLAMA2 = {
    "normalization": "RMSNorm",
    "gated_linear_unit": True,
    "activation_func": torch.nn.functional.silu,
    "add_bias_linear": False,
}


def main() -> None:
    """Train on random tokens."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=MODELS, default="tiny")
    parser.add_argument("--tp", type=int, default=1, help="ranks of tensor parallelism")
    parser.add_argument("--pp", type=int, default=1, help="ranks of pipeline parallelism")
    parser.add_argument("--micro-batch", type=int, default=2, help="sequences in a micro-batch")
    parser.add_argument("--micro-batches", type=int, default=4, help="micro-batches in a step")
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()

    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    else:
        torch.set_num_threads(1)
        pretend_cuda()
    dist.init_process_group("nccl" if on_gpu else "gloo")
    parallel_state.initialize_model_parallel(args.tp, args.pp)
    if on_gpu:
        tensor_parallel.model_parallel_cuda_manual_seed(0)
    torch.manual_seed(0)

    size = MODELS[args.model]
    dtype = torch.bfloat16 if on_gpu else torch.float32
    config = TransformerConfig(
        num_layers=size.layers,
        hidden_size=size.width,
        num_attention_heads=size.heads,
        ffn_hidden_size=size.llama_ffn or 4 * size.width,
        **(LLAMA2 if size.llama_ffn else {}),
        tensor_model_parallel_size=args.tp,
        pipeline_model_parallel_size=args.pp,
        pipeline_dtype=dtype,
        params_dtype=dtype,
        bf16=on_gpu,
        use_cpu_initialization=not on_gpu,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        gradient_accumulation_fusion=False,  # these two need Apex
        masked_softmax_fusion=False,
    )
    gpt = GPTModel(
        config,
        get_gpt_layer_local_spec(normalization=config.normalization),
        vocab_size=size.vocabulary,
        max_sequence_length=size.sequence,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        position_embedding_type="rope" if size.llama_ffn else "learned_absolute",
    )
    device = torch.device("cuda") if on_gpu else torch.device("cpu")
    gpt.to(device)
    overlapping = DistributedDataParallelConfig(
        overlap_grad_reduce=True,
        overlap_param_gather=True,
        use_distributed_optimizer=True,
        bucket_size=None if on_gpu else 100_000,
    )
    model = DistributedDataParallel(config, overlapping, Float16Module(config, gpt) if on_gpu else gpt)
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=1e-4,
            bf16=on_gpu,
            params_dtype=dtype,
            use_distributed_optimizer=True,
            overlap_param_gather=True,
        ),
        [model],
    )
    config.no_sync_func = model.no_sync
    config.grad_scale_func = optimizer.scale_loss
    config.finalize_model_grads_func = finalize_model_grads
    forward_backward = get_forward_backward_func()

    mask = torch.ones(1, 1, size.sequence, size.sequence, dtype=torch.bool, device=device).triu(1)
    positions = torch.arange(size.sequence, device=device).expand(args.micro_batch, -1)
    # The ranks that share a batch draw the same tokens.
    tokens = torch.Generator(device).manual_seed(parallel_state.get_data_parallel_rank())

    def forward(_, module):
        batch = torch.randint(size.vocabulary, (args.micro_batch, size.sequence), generator=tokens, device=device)
        return module(batch, positions, mask, labels=batch.roll(-1, 1)), mean

    def mean(losses):
        loss = losses.float().mean()
        return loss, {"loss": loss.detach()}

    with attach([model], optimizer, every_n_steps=100, max_overhead=None):
        for _ in range(args.steps):
            model.zero_grad_buffer()
            optimizer.zero_grad()
            forward_backward(
                forward_step_func=forward,
                data_iterator=None,
                model=model,
                num_microbatches=args.micro_batches,
                seq_length=size.sequence,
                micro_batch_size=args.micro_batch,
                forward_only=False,
            )
            optimizer.step()

    dist.barrier()
    dist.destroy_process_group()


def pretend_cuda() -> None:
    """Give Megatron-core the CPU where it asks for CUDA. For trying things out only."""

    def on_cpu(make):
        return lambda *args, **kwargs: make(*args, **{**kwargs, **({"device": "cpu"} if "device" in kwargs else {})})

    torch.zeros, torch.tensor = on_cpu(torch.zeros), on_cpu(torch.tensor)
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.synchronize = lambda *_: None
    torch.Tensor.cuda = lambda tensor, *_, **__: tensor
    name_of = torch.Tensor.type  # the optimizer only takes tensors whose type is "torch.cuda...."
    torch.Tensor.type = lambda tensor, *args: name_of(tensor, *args) if args else "torch.cuda.FloatTensor"
    tensor_parallel.random.CudaRNGStatesTracker.fork = lambda *_: contextlib.nullcontext()


if __name__ == "__main__":
    main()
