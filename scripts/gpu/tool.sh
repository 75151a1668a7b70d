#!/usr/bin/env bash
# The tool itself on a GPU host: a stock DFLASH server runs; apply patches its venv, restarts it as DDTREE, probes the real
# op and runs the smoke suite; verify; revert gives back files and server.
#   tool.sh VENV WORK OUT        VENV: a stock venv of this run's own
set -uo pipefail
venv=$1 work=$2 out=$3
root=$(cd "$(dirname "$0")/../.." && pwd)
cd "$root" && mkdir -p "$work" "$out"
pair=$root/tests/models/tiny-b8 port=32000
export HF_HUB_OFFLINE=1 FLASHINFER_USE_CUDA_NORM=1 FLASHINFER_DISABLE_VERSION_CHECK=1
(cd "$work" && exec setsid "$venv/bin/python" -m sglang.launch_server --model-path "$pair/target" --skip-tokenizer-init --port $port \
    --attention-backend triton --sampling-backend pytorch --grammar-backend none --disable-piecewise-cuda-graph \
    --mem-fraction-static 0.04 --context-length 2048 --max-running-requests 8 --cuda-graph-max-bs 8 \
    --speculative-algorithm DFLASH --speculative-draft-model-path "$pair/draft" > "$work/stock.log" 2>&1) &
for _ in $(seq 300); do grep -q "fired up" "$work/stock.log" && break; sleep 1; done
cat > "$work/hosts.toml" <<TOML
[hosts.local]
local = true
venv = "$venv"
[hosts.local.service]
kind = "process"
args = { "--speculative-algorithm" = "DDTREE", "--speculative-ddtree-budget" = 32 }
[hosts.local.endpoint]
port = $port
[hosts.local.ready]
deadline = 400
[hosts.local.smoke]
suite = "tiny"
TOML
sums() { (cd "$venv/lib" && find . -path '*/site-packages/sglang*' -type f ! -name '*.pyc' -print0 | sort -z | xargs -0 sha256sum | sha256sum); }
before=$(sums) status=0
for command in apply verify smoke-test status revert; do
    began=$SECONDS
    "$venv/bin/python" -m patcher "$command" --local --config "$work/hosts.toml" --json > "$out/tool-$command.json" 2> "$work/tool-$command.err"
    code=$?
    echo "tool: $command: exit $code after $((SECONDS - began)) s"
    [ $code = 0 ] || { status=1; tail -5 "$work/tool-$command.err"; }
done
[ "$before" = "$(sums)" ] && echo "tool: every file as at the start" || { status=1; echo "tool: files differ"; }
# end the server that revert started
pid=$("$venv/bin/python" - <<PY
import glob
for path in glob.glob("/proc/[0-9]*/cmdline"):
    argv = open(path, "rb").read().split(b"\\0")
    if b"sglang.launch_server" in argv and b"$port" in argv and argv[0].startswith(b"$venv/"):
        print(path.split("/")[2]); break
PY
)
[ -n "$pid" ] && kill -TERM "$pid"
exit $status
