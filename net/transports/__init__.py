"""What carries links: gRPC, and its twin in memory for tests and simulated worlds."""
