"""A cluster over a wide-area network on one machine: the machines over a modelled network, or real
processes over shaped paths, with a report at the end."""
