"""The environment of a job as a part of a W&B run's configuration, by which runs can be filtered and compared."""

from __future__ import annotations

from typing import Any

from overlap_callbacks.analysis.results.environment import JobEnvironment


def job_content(environment: JobEnvironment | None) -> dict[str, Any]:
    """Hosts, devices, transports and differences between ranks; nothing where they are not known.

    What rank 0 runs on is in the configuration already, with the rest of what is known of the run.
    """
    if environment is None:
        return {}
    return {
        "job": {
            "hosts": environment.num_hosts,
            "devices": environment.num_devices,
            "transport": {transport.between: transport.transport for transport in environment.transports},
            "differs_between_ranks": [difference.name for difference in environment.differing],
        }
    }
