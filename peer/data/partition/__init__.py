"""A data set divided among the clients of federated training: by lot, by Dirichlet, by shards or by
key."""

from .client_sets import Partition
from .divide import divide, partition

__all__ = ["Partition", "divide", "partition"]
