#!/usr/bin/env bash
# Makes .venv-sglang: a real SGLang engine on a CPU, in an environment of its own, as in production.
# SGLang's own requirements name the CUDA stack, so it comes last and without them.
# usage: scripts/install_sglang_cpu.sh [FOLDER]
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${1:-.venv-sglang}
python=${PYTHON:-python3}
stamp="$venv/.installed"
wanted=$(cat requirements/sglang-cpu.txt scripts/install_sglang_cpu.sh pyproject.toml | sha256sum | cut -d' ' -f1)
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ]; then
  exit 0
fi
echo "plait: making $venv (a CPU engine; about 3 GB, one to three minutes)" >&2
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
"$venv/bin/pip" install --quiet --upgrade pip
"$venv/bin/pip" install --quiet torch==2.13.0
"$venv/bin/pip" install --quiet -r requirements/sglang-cpu.txt
"$venv/bin/pip" install --quiet --no-deps sglang==0.5.23 torchvision==0.28.0
# The in-engine half of the rollout agent; everything it needs is in the requirements above.
"$venv/bin/pip" install --quiet --no-deps --editable .
echo "$wanted" >"$stamp"
