from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import overlap_callbacks

CORE = Path(overlap_callbacks.__file__).parent
FORBIDDEN = (
    "lightning",
    "pytorch_lightning",
    "deepspeed",
    "megatron",
    "transformers",
    "accelerate",
    "wandb",
    "tensorboard",
    "pynvml",
    "amdsmi",
)


def loaded_by(statement: str) -> set[str]:
    code = f"{statement}\nimport sys\nprint(*sorted({{name.split('.')[0] for name in sys.modules}}))"
    return set(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split())


def test_importing_the_core_imports_no_framework_no_sink_and_no_vendor_library() -> None:
    assert not loaded_by("import overlap_callbacks, overlap_callbacks.cli").intersection(FORBIDDEN)


def test_the_help_of_every_command_is_printed_without_any_heavy_library() -> None:
    commands = [[], ["analyze"], ["check"], ["compare"], ["demo"], ["report"], ["show"], ["tune"], ["workspace"]]
    run = "".join(f"main({[*command, '--help']!r}, standalone_mode=False)\n" for command in commands)
    loaded = loaded_by(f"from overlap_callbacks.cli import main\n{run}")
    assert not loaded.intersection(FORBIDDEN)
    assert not loaded.intersection({"torch", "numpy", "scipy", "msgspec", "rich", "jinja2"})
    assert "overlap_callbacks" in loaded


def test_importing_the_core_does_not_import_the_adapters() -> None:
    code = "import overlap_callbacks, sys; print('overlap_callbacks.integrations' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_what_the_core_needs_beyond_torch_is_small() -> None:
    beyond = loaded_by("import overlap_callbacks") - loaded_by("import torch, torch.distributed, torch.profiler")
    third_party = {name for name in beyond if name not in sys.stdlib_module_names and not name.startswith("_")}
    assert third_party <= {"overlap_callbacks", "msgspec"}


@pytest.mark.parametrize("file", sorted(CORE.rglob("*.py")), ids=lambda file: file.name)
def test_no_file_of_the_core_imports_an_adapter_at_its_top(file: Path) -> None:
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
            assert not any("integrations" in name for name in names)
            assert not any(name.split(".")[0] in FORBIDDEN for name in names)


def test_an_adapter_whose_framework_is_missing_names_the_extra() -> None:
    code = (
        "import sys\n"
        "sys.modules['lightning'] = sys.modules['lightning.pytorch'] = sys.modules['pytorch_lightning'] = None\n"
        "import overlap_callbacks.integrations.lightning"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "pip install 'overlap-callbacks[lightning]'" in done.stderr.splitlines()[-1]
