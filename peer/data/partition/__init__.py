"""A data set divided among the clients of federated training: by lot, by Dirichlet, by shards or by
key."""

from .client_sets import Partition
from .divide import divide, partition
from .of_run import partition_of

__all__ = ["Partition", "divide", "partition", "partition_of"]
