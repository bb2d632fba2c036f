"""Machines made by hand, for tests."""

from __future__ import annotations

from overlap_callbacks.experiments.machine import Machine

VERSIONS = {"torch": "2.13.0", "deepspeed": "0.19.8"}
CPU = Machine(cpu="AMD EPYC, 2 cores", cores=2, free_bytes=8 * 2**30, versions=VERSIONS)
H100S = Machine(num_gpus=8, gpu="NVIDIA H100 80GB HBM3", capability=(9, 0), cores=96, versions=VERSIONS)
V100S = Machine(num_gpus=4, gpu="Tesla V100-SXM2-16GB", capability=(7, 0), versions={"torch": "2.13.0"})
MI250S = Machine(num_gpus=4, gpu="AMD Instinct MI250X", is_amd=True, versions=VERSIONS)
