"""A Lightning trainer. Only the callback is added for the library.

python examples/lightning_ddp.py
python examples/lightning_ddp.py --model gpt3-1.3b

It uses all GPUs if there are two or more, else two processes on the CPU. Every GPU holds the whole model, its gradients
and the optimizer's two moments: at least 16 bytes per weight.
"""

import logging

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import DDPStrategy
from models import MODELS, LanguageModel, parse_arguments

from overlap_callbacks.integrations.lightning import OverlapCallback

logging.basicConfig(format="%(message)s")
logging.getLogger("overlap_callbacks").setLevel(logging.INFO)  # shows one line per window


class Module(pl.LightningModule):
    """A language model."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.net = LanguageModel(name)

    def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
        """The loss."""
        return self.net(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


def main() -> None:
    """Train on random tokens."""
    args = parse_arguments()
    on_gpu = torch.cuda.device_count() > 1
    if not on_gpu:
        torch.set_num_threads(1)
    size = MODELS[args.model]
    backend, bucket = "nccl" if on_gpu else "gloo", 1 if args.model == "tiny" else 25
    trainer = pl.Trainer(
        accelerator="gpu" if on_gpu else "cpu",
        devices="auto" if on_gpu else 2,
        strategy=DDPStrategy(process_group_backend=backend, bucket_cap_mb=bucket),
        precision="bf16-mixed" if on_gpu else "32-true",
        max_steps=args.steps,
        enable_checkpointing=False,
        callbacks=[OverlapCallback(every_n_steps=100, max_overhead=None)],
    )
    tokens = torch.randint(size.vocabulary, (4096, size.sequence))
    trainer.fit(Module(args.model), torch.utils.data.DataLoader(tokens, batch_size=args.batch))


if __name__ == "__main__":
    main()
