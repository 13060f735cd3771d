"""What carries links: gRPC, and its twin in memory for tests and simulated worlds."""

__all__ = [
    "carrier",
    "grpc_transport",
    "memory",
]
