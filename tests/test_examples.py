"""The examples run as their first lines say, and the models that they name are as large as their names."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from tests.distributed import run_script
from tests.margins import PATIENCE_S

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"

# The package that each needs, and its options for a short run.
SCRIPTS = {
    "pytorch_ddp": ("torch", []),
    "micro_batches": ("torch", ["--compare"]),
    "fsdp2": ("torch", []),
    "lightning_ddp": ("lightning", []),
    "deepspeed_zero2": ("deepspeed", []),
    "deepspeed_zero3": ("deepspeed", []),
    "megatron_core": ("megatron", ["--pp", "2"]),
    "huggingface_trainer": ("transformers", []),
}
# What starts the ranks: Lightning does so itself, and one of the others is started as its first line says. The rest is
# started in the same way by the tests' harness, which has torch loaded already.
LAUNCHERS = {
    "pytorch_ddp": ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"],
    "lightning_ddp": [],
}


@pytest.fixture(scope="module")
def models() -> ModuleType:
    spec = importlib.util.spec_from_file_location("example_models", EXAMPLES / "models.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("name", "billions"),
    [("gpt3-1.3b", 1.3), ("gpt3-2.7b", 2.7), ("gpt3-6.7b", 6.7), ("gpt3-13b", 13.0), ("llama2-13b", 13.0)],
)
def test_a_models_name_tells_its_size(models: ModuleType, name: str, billions: float) -> None:
    with torch.device("meta"):
        model = models.LanguageModel(name)
        loss = model(torch.zeros(1, 16, dtype=torch.long))
    assert loss.shape == ()
    assert sum(parameter.numel() for parameter in model.parameters()) == pytest.approx(billions * 1e9, rel=0.03)


@pytest.mark.parametrize("llama_ffn", [0, 48])
def test_a_token_is_predicted_from_those_before_it_alone(models: ModuleType, llama_ffn: int) -> None:
    models.MODELS["test"] = models.Size(2, 32, 4, vocabulary=50, sequence=12, llama_ffn=llama_ffn)
    torch.manual_seed(0)
    model = models.LanguageModel("test")
    tokens = torch.randint(50, (2, 12))
    assert model(tokens).item() == pytest.approx(torch.tensor(50.0).log().item(), rel=0.05)  # nothing learnt yet

    inputs = torch.randn(1, 12, 32, requires_grad=True)
    model.blocks[1](model.blocks[0](inputs))[0, 5].sum().backward()
    reached = inputs.grad[0].abs().sum(dim=-1) > 0
    assert reached.tolist() == [True] * 6 + [False] * 6


def test_the_weights_of_a_model_that_was_on_no_device_can_be_drawn_later(models: ModuleType) -> None:
    with torch.device("meta"):
        model = models.LanguageModel("tiny")
    model.to_empty(device="cpu")
    model.init_weights()
    assert all(
        parameter.isfinite().all() and parameter.std() < 0.03 for parameter in model.parameters() if parameter.dim() > 1
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
def test_an_example_trains_on_two_processes_without_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    package, options = SCRIPTS[name]
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is missing")
    environment = {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    script, arguments = EXAMPLES / f"{name}.py", ["--steps", "3", *options]
    if package == "deepspeed":
        script, arguments = Path(__file__).with_name("deepspeed_example.py"), [str(script), *arguments]
    monkeypatch.chdir(tmp_path)
    if name in LAUNCHERS:
        command = [sys.executable, *LAUNCHERS[name], str(script), *arguments]
        everything = {**os.environ, **environment}
        try:
            ran = subprocess.run(
                command, env=everything, capture_output=True, text=True, timeout=PATIENCE_S, check=False
            )
        except subprocess.TimeoutExpired as late:  # which hides what it has said so far
            said = [str(stream or "")[-4000:] for stream in (late.stdout, late.stderr)]
            pytest.fail(f"{name} did not end within {PATIENCE_S:g} s, and said: " + "\n".join(said))
        assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-4000:]
        output = ran.stdout + ran.stderr
    else:
        output = "".join(rank.output for rank in run_script(script, arguments, 2, environment))
    # The first window would have opened later.
    assert "nothing was measured: the first window starts at step 20" in output
