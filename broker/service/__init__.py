"""The daemon: gRPC services, blobs on disk, and the shell that carries the machine's instructions
out."""
