"""The W&B run that a sink logs to: which one it is, and how one is started."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from overlap_callbacks._log import logger


def destination(run: Any, *, starts: bool) -> str:
    """The run in use, in words: the given one, the active one, or the one that the sink ``starts``."""
    run = run or getattr(sys.modules.get("wandb"), "run", None)
    if run is None:
        return "a new W&B run" if starts else ""
    return f"W&B run {getattr(run, 'name', None) or getattr(run, 'id', '')}".strip()


def start_run(init: Mapping[str, Any], timeout_s: float, *, hide_host: bool) -> Any:
    """Start a run; if W&B does not start it in time, it is logged offline.

    The timeout also limits what W&B takes at the end. A hidden host is named by its number.

    Raises:
        ImportError: wandb is not installed.
        RuntimeError: nobody is logged in to W&B.
    """
    try:
        import wandb
    except ImportError:
        raise ImportError(
            "wandb is not installed: pip install 'overlap-callbacks[wandb]', or leave WandbSink out"
        ) from None
    given = init.get("settings")
    of_settings = given.get("mode") if isinstance(given, Mapping) else _named(given).get("mode")
    mode = init.get("mode") or of_settings or wandb.setup().settings.mode
    # wandb.init would prompt for a key on the terminal, and block.
    if mode not in ("offline", "disabled", "dryrun") and not logged_in(wandb):
        raise RuntimeError(
            "nobody is logged in to W&B: run `wandb login`, set WANDB_API_KEY, or set WANDB_MODE=offline"
        )
    settings = _bounded(wandb, given, timeout_s, hide_host=hide_host)
    try:
        return wandb.init(**{**init, "settings": settings})
    except wandb.errors.CommError as error:
        logger.warning("overlap-callbacks: W&B is not to be reached, so the run is logged offline: %s [OC607]", error)
        return wandb.init(**{**init, "settings": settings, "mode": "offline"})


def logged_in(wandb: Any) -> bool:
    """Whether there is a key for W&B's server; never prompts the user."""
    try:
        return bool(wandb.login(prompt=False, verify=False))
    except TypeError:  # an older version without the parameter
        return bool(wandb.setup().settings.api_key or wandb.api.api_key)


def _bounded(wandb: Any, given: Any, timeout_s: float, *, hide_host: bool) -> Any:
    """The given settings, with a timeout for W&B and a name for the host unless they set them themselves.

    The timeout also bounds wandb's own hook at interpreter exit.
    """
    bounds: dict[str, Any] = {"host": "host 0"} if hide_host else {}
    bounds |= {"init_timeout": timeout_s, "finish_timeout": timeout_s, "finish_timeout_raises": True}
    known = getattr(wandb.Settings, "model_fields", {})
    bounds = {name: value for name, value in bounds.items() if name in known}  # older versions lack some
    if given is None:
        return wandb.Settings(**bounds)
    if isinstance(given, Mapping):
        return {**bounds, **given}
    if isinstance(given, wandb.Settings):
        return given.model_copy(update={name: value for name, value in bounds.items() if name not in _named(given)})
    return given


def _named(settings: Any) -> dict[str, Any]:
    """The settings that were set explicitly, without the defaults."""
    return {name: getattr(settings, name) for name in getattr(settings, "model_fields_set", ())}
