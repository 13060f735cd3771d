#!/usr/bin/env bash
# What a machine with a card can say in eight minutes, without a network.
#
#   bash benchmarks/gpu/gpu.sh [--cpu] [--wheels DIR] [--only "PART …"] [OUT]
#                                                               # measure; figures and logs in OUT
#   bash benchmarks/gpu/gpu.sh wheels DIR [PYTHON]              # before, with a network: what may lack
#
# The machine has a Python with torch (2.10 or newer) and most libraries; what lacks is installed
# from DIR beside them. PYTHON (3.12) is the version there. The parts: tests that need a card, two
# peers on one card as stages and as replicas, whole training steps beside a plain loop, the
# executor, steps in fp32 and bf16 with staging to the card, and codecs. Each has a limit of its
# own, and one that fails does not stop the next.
# OUT/gpu.json has the figures and the list of what failed; then the exit code is 1. --cpu runs
# the same parts, small, without a card and with six times the time.
set -uo pipefail

root=$(cd "$(dirname "$0")/../.." && pwd)
python=${PYTHON:-python3}

requirements() { # all but torch, which is there; hivemind has no place on such a machine
  "$python" - "$root/pyproject.toml" <<'PY'
import sys, tomllib
project = tomllib.load(open(sys.argv[1], "rb"))["project"]
extra = project["optional-dependencies"]
wanted = project["dependencies"] + [x for k in ("hf", "examples", "page", "test") for x in extra[k]]
print("\n".join(x for x in wanted if not x.startswith(("torch>", "shoal", "hivemind", "grpcio-tools"))))
PY
}

if [ "${1:-}" = wheels ]; then
  folder=${2:?a folder for the wheels}
  mkdir -p "$folder"
  requirements > "$folder/requirements.txt"
  "$python" -m pip download -q -d "$folder" --only-binary=:all: --python-version "${3:-3.12}" \
    --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 \
    -c <(grep -v '^torch==' "$root/constraints.txt") -r "$folder/requirements.txt" || exit 1
  # Others need a torch, and the machine has one.
  rm -f "$folder"/{torch,triton,nvidia_,cuda_}*.whl
  du -sh "$folder"
  exit 0
fi

device=cuda wheels="$root/wheels" only=
while [ $# -gt 0 ]; do
  case $1 in
    --cpu) device=cpu; shift ;;
    --wheels) wheels=$2; shift 2 ;;
    --only) only="setup $2"; shift 2 ;;
    --help | -h) sed -n '2,/^set/s/^# \{0,1\}//p' "$0"; exit 0 ;;
    *) break ;;
  esac
done
out=${1:-${OUT:-gpu-out}}
mkdir -p "$out" && out=$(cd "$out" && pwd)
work=$(mktemp -d)
# A card's machine has cores to itself. Without one this tries the script, on whatever is busy.
end=$((SECONDS + 470)) slack=1
[ $device = cpu ] && end=$((SECONDS + 3600)) slack=6
failed=() passed=()
trap 'rm -rf "$work"' EXIT

part() { # NAME LIMIT COMMAND…: its output to OUT/NAME.log, and how it ended to the lists
  local name=$1 limit=$(($2 * slack)) started=$SECONDS left=$((end - SECONDS)) code=0
  shift 2
  [[ -z $only || " $only " = *" $name "* ]] || return 0
  if [ "$left" -lt 5 ]; then code=124; else
    [ "$limit" -lt "$left" ] || limit=$left
    (cd "$root" && timeout -k 5 "$limit" "$@") > "$out/$name.log" 2>&1 || code=$?
  fi
  if [ $code -eq 0 ]; then passed+=("$name"); else failed+=("$name"); fi
  echo "$name: $([ $code -eq 0 ] && echo ok || echo "FAILED ($code)") in $((SECONDS - started)) s"
  [ $code -eq 0 ] || tail -n 15 "$out/$name.log"
}

setup() { # an environment over the machine's own, with what lacks
  "$python" -m venv --without-pip --system-site-packages "$work/venv" || return 1
  # An environment over another one has that one's libraries only by its path.
  "$python" -c 'import site, sys; print("\n".join(p for p in sys.path if "packages" in p))' \
    > "$("$work/venv/bin/python" -c 'import site; print(site.getsitepackages()[0])')/machine.pth"
  requirements > "$work/requirements.txt"
  if [ -d "$wheels" ]; then
    "$python" -m pip --python "$work/venv/bin/python" install --no-index --find-links "$wheels" \
      -r "$work/requirements.txt" || return 1
  fi
  "$work/venv/bin/python" -c 'import sys, torch, grpc; print(sys.version, torch.__version__)'
}

export PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
export -f requirements setup
export root python work wheels
part setup 60 bash -c setup
mkdir -p "$work/path" && ln -sfn "$root" "$work/path/shoal"
export PYTHONPATH="$work/path"
py="$work/venv/bin/python"
small=0 && [ $device = cpu ] && small=1

mapfile -t files < <(cd "$root" && grep -rl "mark.gpu" tests --include='*.py')
part tests 140 "$py" -m pytest -q -n 0 -p no:cacheprovider -m gpu -rfE --junitxml "$out/tests.xml" \
  "${files[@]}"
pair() { # NAME LIMIT OPTIONS…
  local name=$1 limit=$2
  shift 2
  part "$name" "$limit" "$py" benchmarks/gpu/pair.py --device $device --folder "$work/$name" \
    --json "$out/$name.json" "$@"
}
pair pair-fp32 100 --cpu-too
pair pair-rounds 75 --rounds
part whole 75 "$py" benchmarks/gpu/whole.py --device $device --pairs $((small ? 4 : 14)) \
  --json "$out/whole.json"
part steps 70 "$py" benchmarks/gpu/steps.py --device $device --json "$out/steps.json"
part codecs 50 bash -c "'$py' -m shoal.cli bench codecs --json --device $device$([ $small = 1 ] || echo :0) \
  --elements $((small ? 100000 : 10000000)) > '$out/codecs.json'"
part executor 60 "$py" benchmarks/steps/executor.py --device $device --pairs $((small ? 3 : 40)) \
  --json "$out/executor.json"
pair pair-bf16 75 --dtype bf16

"$py" - "$out" "$device" "$SECONDS" "${failed[*]}" "${passed[*]}" <<'PY'
import json, pathlib, sys
out, device, seconds = pathlib.Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
found = {"device": device, "seconds": seconds, "failed": sys.argv[4].split(), "passed": sys.argv[5].split()}
try:
    import torch
    found["torch"] = torch.__version__
    found["card"] = torch.cuda.get_device_name() if torch.cuda.is_available() else None
except Exception as error:
    found["torch"] = f"{type(error).__name__}: {error}"
for file in sorted(out.glob("*.json")):
    if file.name != "gpu.json":
        try:
            found[file.stem] = json.loads(file.read_text())
        except ValueError as error:
            found[file.stem] = f"unreadable: {error}"
(out / "gpu.json").write_text(json.dumps(found, indent=1) + "\n")
PY
echo "${#passed[@]} parts passed, ${#failed[@]} failed: ${failed[*]:-none} · $SECONDS s · $out/gpu.json"
[ ${#failed[@]} -eq 0 ]
