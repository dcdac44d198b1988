#!/usr/bin/env bash
# Everything a change must pass: the set-up of quickstart.sh, lint, the native tests, then pytest.
#
#   bash scripts/test.sh [--setup-only] [--no-native] [--sanitize] [--browser] [--slow] [tests] [-- pytest arguments]
#   bash scripts/test.sh --vulkan [--setup-only] [-- pytest arguments]
#
# Tests are files or names as pytest takes them; its own flags come after --.
# --sanitize runs the native tests under the address and the thread sanitizer too (builds ggml twice more).
# --browser gets Chromium and playwright for the tests of the chat page, which are skipped without them.
# --vulkan builds for Vulkan (in build/vulkan) and runs the tests of the device tier, on the first device that Vulkan names: Mesa's
# software driver where there is no GPU. Needs Debian 13's headers. The next run without it puts the ordinary build back.
# --slow (or LEANSTREAM_SLOW=1) adds the tests that take minutes, such as the comparison with an unpatched build.
set -euo pipefail
# shellcheck source=scripts/setup_common.sh
. "$(dirname "${BASH_SOURCE[0]}")/setup_common.sh"

native=1 sanitize=0 browser=0 vulkan=0 setup_only=0
pytest_args=()
while [ $# -gt 0 ]; do
    case $1 in
        -h | --help) usage && exit ;;
        --setup-only) setup_only=1 ;;
        --no-native) native=0 ;;
        --sanitize) sanitize=1 ;;
        --browser) browser=1 ;;
        --vulkan) vulkan=1 ;;
        --slow) pytest_args+=(--slow) ;;
        --) pytest_args+=("${@:2}") && break ;;
        -*) wrong_usage "there is no $1; flags of pytest come after --" ;;
        *) pytest_args+=("$1") ;;
    esac
    shift
done
[ "${LEANSTREAM_SLOW:-0}" = 1 ] && pytest_args+=(--slow)

# native_tests [address|thread]: ggml and libleanstream with this sanitizer; libllama comes from the compiler cache.
native_tests() {
    local sanitizer=${1:-} folder="build/native${1:+-$1}"
    step "native tests${sanitizer:+ with the $sanitizer sanitizer}"
    run_logged cmake -S leanstream_gguf/native -B "$folder" -G Ninja -DPython_EXECUTABLE="$VENV/bin/python" \
        -DLEANSTREAM_TESTS=ON -DLEANSTREAM_PYTHON=OFF -DLEANSTREAM_MTMD=OFF -DLEANSTREAM_SANITIZE="$sanitizer"
    run_logged cmake --build "$folder"
    ctest --test-dir "$folder" --output-on-failure --timeout 300
}

extras=server,dev
if [ "$browser" = 1 ]; then
    extras+=,browser
    install_browser
fi
if [ "$vulkan" = 1 ]; then
    install_vulkan
    BUILD_DIR=build/vulkan
    export CMAKE_ARGS="${CMAKE_ARGS:-} -DGGML_VULKAN=ON -DLEANSTREAM_TESTS=ON"
fi
set_up "$extras"
if [ "$setup_only" = 1 ]; then
    step "ready: .venv/bin/leanstream, .venv/bin/pytest"
    exit
fi

if [ "$vulkan" = 1 ]; then
    export GGML_VK_VISIBLE_DEVICES=${GGML_VK_VISIBLE_DEVICES:-0} LEANSTREAM_TEST_DEVICE=1
    step "device tests on Vulkan"
    ctest --test-dir "$BUILD_DIR" --output-on-failure -R device
    pytest tests/test_device.py "${pytest_args[@]}"
    exit
fi

step "lint"
ruff check .
ruff format --check .
mypy
if [ "$native" = 1 ] && [ -f tests/native/CMakeLists.txt ]; then
    native_tests
    if [ "$sanitize" = 1 ]; then
        native_tests address
        native_tests thread
    fi
fi
step "pytest"
pytest "${pytest_args[@]}"
