#!/usr/bin/env bash
# From a fresh clone to an answer: system packages, .venv, build, demo model, then one streamed run under a budget smaller
# than the model needs. Again and again: does only what is missing.
#
#   bash scripts/quickstart.sh [--setup-only]
#
# CMAKE_ARGS="-DGGML_CUDA=ON" (or -DGGML_VULKAN=ON) builds for a GPU.
set -euo pipefail
# shellcheck source=scripts/setup_common.sh
. "$(dirname "${BASH_SOURCE[0]}")/setup_common.sh"

setup_only=0
for arg in "$@"; do
    case $arg in
        -h | --help) usage && exit ;;
        --setup-only) setup_only=1 ;;
        *) wrong_usage "there is no $arg" ;;
    esac
done

set_up server
if [ "$setup_only" = 1 ]; then
    step "ready: .venv/bin/leanstream"
    exit
fi

# Halfway between the least that the model runs with and what would hold all of it.
budget=$(leanstream plan -m "$MODEL" --json | python -c '
import json, sys
plan = json.load(sys.stdin)
print((plan["minimum_budget_bytes"] + plan["full_budget_bytes"]) // 2 >> 20, "MiB", sep="")')
step "streaming an answer with the whole process held under $budget"
set -x
leanstream run -m "$MODEL" -p "Explain in two sentences why the sky is blue." -n 64 --memory "$budget"
