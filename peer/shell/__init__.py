"""The worker process around the machine: asyncio, gRPC, threads of the device, credentials, and the
way to the broker."""
