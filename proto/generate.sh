#!/usr/bin/env bash
# Writes the stubs beside the .proto files (needs grpcio-tools); tests/proto holds them equal.
# usage: bash proto/generate.sh [OUTPUT FOLDER]
set -euo pipefail
cd "$(dirname "$0")/.."
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
"${PYTHON:-python}" -m grpc_tools.protoc -Ishoal/proto=proto --python_out="$out" \
  --pyi_out="$out" --grpc_python_out="$out" \
  shoal/proto/{common,graph,peer,broker,admission,discovery,journal,planning}.proto
for file in proto/*.proto; do  # a stub without a service says nothing
  grep -q '^service' "$file" || rm "$out/shoal/$(dirname "$file")/$(basename "$file" .proto)_pb2_grpc.py"
done
mv "$out"/shoal/proto/* "${1:-proto}"
