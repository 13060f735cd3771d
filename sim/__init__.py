"""A cluster over a wide-area network on one machine: the machines over a modelled network, or real
processes over shaped paths, with a report at the end."""

__all__ = [
    "cluster",
    "faults",
    "following",
    "front",
    "ghost",
    "live",
    "modelled",
    "monitor",
    "options",
    "oracle",
    "plain_rounds",
    "processes",
    "report",
    "round_buffers",
    "round_log",
    "round_methods",
    "round_oracle",
    "scenario",
    "shaped",
    "simulate",
    "trace",
    "verify",
    "virtual",
]
