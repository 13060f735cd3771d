#!/usr/bin/env bash
# The ends of the range of torch that pyproject.toml promises: capture, codecs and examples on each.
#
#   bash benchmarks/gpu/torch_ends.sh [--keep DIR] [--json FILE] [VERSION ...]
#
# Each version gets an environment of its own, with everything else as constraints.txt pins it, and
# runs tests/dag, tests/compression and tests/examples/test_examples.py. PyPI's wheels for Linux bring CUDA
# along, and torch does not load without: 3 to 4 GB to download and 5 to 8 GB of disk for each,
# removed again unless --keep names a folder. Ends with 1 when a test fails; the table says which.
set -euo pipefail

root=$(cd "$(dirname "$0")/../.." && pwd)
work="" json="" versions=()
while [ $# -gt 0 ]; do
  case $1 in
    --keep) work=$2; shift 2 ;;
    --json) json=$2; shift 2 ;;
    --help | -h) sed -n '2,/^set/s/^# \{0,1\}//p' "$0"; exit 0 ;;
    *) versions+=("$1"); shift ;;
  esac
done
[ ${#versions[@]} -gt 0 ] || versions=(2.10.0 2.11.0 2.14.1)
if [ -n "$work" ]; then mkdir -p "$work"; else
  work=$(mktemp -d)
  trap 'rm -rf "$work"' EXIT
fi

one() { # VERSION FOLDER: an environment, the tests, and their counts as one JSON object
  local version=$1 folder=$2 python=$2/bin/python started=$SECONDS
  [ -x "$python" ] || "${PYTHON:-python3}" -m venv "$folder"
  grep -v '^torch==' "$root/constraints.txt" > "$folder/constraints.txt"
  if ! "$python" -m pip install -c "$folder/constraints.txt" "torch==$version" -e "$root[test]" \
    > "$folder/install.log" 2>&1; then
    tail -n 20 "$folder/install.log"
    return 1
  fi
  local installed=$SECONDS
  (cd "$root" && PYTHONDONTWRITEBYTECODE=1 nice -n 10 "$python" -m pytest -q -n 1 -o timeout=1200 -p no:cacheprovider \
    --junitxml "$folder/tests.xml" tests/dag tests/compression tests/examples/test_examples.py \
    > "$folder/tests.log" 2>&1) || true
  "$python" - "$folder" $((installed - started)) $((SECONDS - installed)) <<'PY'
import json, pathlib, re, subprocess, sys
import xml.etree.ElementTree as ElementTree
import torch

folder, install_s, test_s = pathlib.Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
log = (folder / "install.log").read_text()
units = {"kB": 1e-3, "MB": 1.0, "GB": 1e3}
sizes = re.findall(r"(?:Downloading|Using cached) \S+ \(([\d.]+) ([kMG]B)\)", log)
files = [pathlib.Path(p) for p in re.findall(r"Processing (\S+\.whl)", log)]  # an index on disk
wheels_mb = sum(float(n) * units[u] for n, u in sizes) + sum(f.stat().st_size / 1e6 for f in files)
disk_mb = int(subprocess.check_output(["du", "-sm", str(folder)]).split()[0])
if not (folder / "tests.xml").exists():
    sys.exit((folder / "tests.log").read_text()[-3000:])
cases = list(ElementTree.parse(folder / "tests.xml").iter("testcase"))
bad = [c for c in cases if c.find("failure") is not None or c.find("error") is not None]
skipped = [c for c in cases if c.find("skipped") is not None]
print(json.dumps({
    "torch": torch.__version__,
    "passed": len(cases) - len(bad) - len(skipped),
    "failed": len(bad),
    "skipped": len(skipped),
    "wheels_mb": round(wheels_mb),
    "disk_mb": disk_mb,
    "install_s": install_s,
    "test_s": test_s,
    "failures": sorted(f"{c.get('classname')}::{c.get('name')}" for c in bad),
}))
PY
}

status=0
for version in "${versions[@]}"; do
  echo "== torch $version"
  if one "$version" "$work/$version" > "$work/$version.json"; then
    cat "$work/$version.json"
    grep -q '"failed": 0,' "$work/$version.json" || status=1
  else
    cat "$work/$version.json" && rm "$work/$version.json"
    echo "torch $version: not tested, see above"
    status=1
  fi
  case $work in /tmp/tmp.*) rm -rf "${work:?}/$version" ;; esac
done
if [ -n "$json" ]; then
  (cd "$work" && python3 -c '
import json, sys
print(json.dumps([json.load(open(f"{v}.json")) for v in sys.argv[1:]], indent=1))' \
    $(for v in "${versions[@]}"; do [ -f "$work/$v.json" ] && echo "$v"; done)) > "$json"
fi
exit $status
