# shellcheck shell=bash
# Sourced by quickstart.sh and test.sh: everything up to an installed package and the demo model. Each step looks first
# and does only what is missing, so running it again takes seconds. Needs no input, no network once everything is there.

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
VENV="$ROOT/.venv"
LOG="$ROOT/build/setup.log"
BUILD_DIR=build/dev
SECONDS=0
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1
export CC=${CC:-cc} CXX=${CXX:-c++} # one name in every build: the compiler cache tells cc from gcc
exec </dev/null

step() { printf '[%4ds] %s\n' "$SECONDS" "$*"; }
die()  { printf '[%4ds] error: %s\n' "$SECONDS" "$*" >&2; exit 1; }

# The comment at the head of the script that was started says how it is used.
usage() { awk 'NR > 1 { if (!/^#/) exit; sub(/^# ?/, ""); print }' "$0"; }
wrong_usage() {
    printf 'error: %s\n\n' "$*" >&2
    usage >&2
    exit 2
}

# run_logged COMMAND...: output goes to the log; compiler progress is shown; on failure the end of the log is.
run_logged() {
    printf '\n$ %s\n' "$*" >>"$LOG"
    "$@" >>"$LOG" 2>&1 &
    local pid=$! now next=$((SECONDS + 10))
    while kill -0 "$pid" 2>/dev/null; do
        sleep 0.3
        if [ "$SECONDS" -ge "$next" ]; then
            now=$(tail -n 50 "$LOG" | grep -o '^ *\[[0-9]*/[0-9]*\]' | tail -n 1) && step "   $now"
            next=$((SECONDS + 10))
        fi
    done
    wait "$pid" && return
    tail -n 40 "$LOG" >&2
    die "that did not work: $* (whole output: $LOG)"
}

# ---- system packages ----

find_python() {
    local candidate
    for candidate in ${PYTHON:-} python3 python3.14 python3.13 python3.12 python3.11; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
}

python_has() {
    case $1 in
        venv) "$(find_python)" -c 'import ensurepip, venv' ;;
        dev) "$(find_python)" -c 'import os, sys, sysconfig; sys.exit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))' ;;
    esac 2>/dev/null
}

# Debian packages that are missing: what the build cannot do without, then what makes it faster.
missing_required() {
    [ -n "$(find_python)" ] || echo python3 python3-venv python3-dev
    if [ -n "$(find_python)" ]; then
        python_has venv || echo python3-venv
        python_has dev || echo python3-dev
    fi
    command -v c++ >/dev/null && command -v make >/dev/null || echo build-essential
    command -v git >/dev/null || echo git
}
missing_optional() {
    command -v cmake >/dev/null || echo cmake            # else from PyPI
    command -v ninja >/dev/null || echo ninja-build      # else from PyPI
    command -v ccache >/dev/null || echo ccache          # else a rebuild compiles everything again
    command -v pkg-config >/dev/null || echo pkg-config  # finds liburing
    pkg-config --exists liburing 2>/dev/null || echo liburing-dev # else reads go through a pool of threads
}

install_system_packages() {
    local required optional
    required=$(missing_required | xargs)
    optional=$(missing_optional | xargs)
    if [ -z "$required$optional" ]; then
        step "system packages: all there"
    elif command -v apt-get >/dev/null && [ "$(id -u)" = 0 ]; then
        step "system packages: installing $required${optional:+ $optional}"
        export DEBIAN_FRONTEND=noninteractive
        run_logged apt-get update
        # shellcheck disable=SC2086  # lists of words
        run_logged apt-get install -y --no-install-recommends $required $optional
    elif [ -n "$required" ]; then
        die "missing system packages. As root: apt-get update && apt-get install -y $required${optional:+ $optional}"
    else
        step "system packages: going on without $optional (as root: apt-get install -y $optional)"
    fi
    [ -n "$(find_python)" ] || die "Python 3.11 or newer is needed; set PYTHON=/path/to/python3"
}

# Chromium for the tests of the chat page; about 100 MB to download.
install_browser() {
    cd "$ROOT" && mkdir -p build
    if command -v "${LEANSTREAM_TEST_CHROMIUM:-chromium}" >/dev/null; then
        step "chromium: there"
    elif command -v apt-get >/dev/null && [ "$(id -u)" = 0 ]; then
        step "chromium: installing"
        export DEBIAN_FRONTEND=noninteractive
        run_logged apt-get update
        run_logged apt-get install -y --no-install-recommends chromium
    else
        die "no chromium. As root: apt-get update && apt-get install -y chromium; or set LEANSTREAM_TEST_CHROMIUM to one"
    fi
}

# What a build for Vulkan needs, and Mesa's software driver where there is no other.
missing_vulkan() {
    pkg-config --atleast-version=1.4 vulkan 2>/dev/null || echo libvulkan-dev
    command -v glslc >/dev/null || echo glslc
    [ -e /usr/include/spirv/unified1/spirv.hpp ] || echo spirv-headers
    ls /usr/share/vulkan/icd.d/*.json >/dev/null 2>&1 || echo mesa-vulkan-drivers
}

install_vulkan() {
    local missing candidate
    cd "$ROOT" && mkdir -p build
    missing=$(missing_vulkan | xargs)
    if [ -z "$missing" ]; then
        step "vulkan: all there"
        return
    elif ! command -v apt-get >/dev/null || [ "$(id -u)" != 0 ]; then
        die "missing for --vulkan. As root on Debian 13: apt-get update && apt-get install -y pkg-config $missing"
    fi
    export DEBIAN_FRONTEND=noninteractive
    run_logged apt-get update
    candidate=$(apt-cache policy libvulkan-dev | sed -n 's/^ *Candidate: //p')
    dpkg --compare-versions "${candidate:-0}" ge 1.4 || die "--vulkan needs Debian 13 or newer: llama.cpp does not compile with Vulkan headers \
before 1.4 (here libvulkan-dev is $candidate), and the software driver of Debian 12 (Mesa 22.3) crashes in it"
    step "vulkan: installing $missing"
    # shellcheck disable=SC2086  # a list of words
    run_logged apt-get install -y --no-install-recommends pkg-config $missing
}

# ---- Python environment ----

make_venv() {
    # Scripts in a virtual environment hold its absolute path: a moved or copied one is made again.
    if [ "$(cat "$VENV/.leanstream-root" 2>/dev/null)" = "$ROOT" ] && "$VENV/bin/python" -c '' 2>/dev/null; then
        step "virtual environment: .venv is there"
    else
        step "virtual environment: making .venv with $(find_python)"
        run_logged "$(find_python)" -m venv --clear "$VENV"
        echo "$ROOT" >"$VENV/.leanstream-root"
    fi
    export PATH="$VENV/bin:$PATH" VIRTUAL_ENV="$VENV"
}

build_requirements() {
    "$VENV/bin/python" -c 'import tomllib; print("\n".join(tomllib.load(open("pyproject.toml", "rb"))["build-system"]["requires"]))'
    command -v cmake >/dev/null || echo "cmake>=3.21,<4"
    command -v ninja >/dev/null || echo "ninja"
}

install_build_tools() {
    local -a tools
    mapfile -t tools < <(build_requirements)
    step "build tools: ${tools[*]}"
    run_logged python -m pip install "${tools[@]}"
}

# llama-cpp-python without its own copy of llama.cpp, from the archive that holds our sources too. Installed by path, so
# that pip's cache does not give the wheel without libraries to other environments.
install_llama_cpp_python() {
    local version sdist
    version=$(sed -n 's/^version = "\(.*\)"/\1/p' vendor/llama.cpp.toml)
    if python -c "import importlib.metadata as m, sys; sys.exit(m.version('llama-cpp-python') != '$version')" 2>/dev/null; then
        step "llama-cpp-python: $version is there"
        return
    fi
    step "llama-cpp-python: installing $version without compiling its libraries"
    sdist=$(python vendor/fetch.py --sdist 2>>"$LOG") || die "no source archive of llama-cpp-python $version, see $LOG"
    CMAKE_ARGS="-DLLAMA_BUILD=OFF -DLLAVA_BUILD=OFF" run_logged python -m pip install "llama-cpp-python[server] @ file://$sdist"
}

# install_package EXTRAS [pip options]: builds in BUILD_DIR and installs this folder, editable: a changed Python file needs
# no second run, a changed C++ file does.
install_package() {
    local extras=$1
    shift
    step "leanstream-gguf: compiling llama.cpp and the runtime (minutes at first, seconds with ccache)"
    run_logged python -m pip install -v --no-build-isolation --config-settings=build-dir="$BUILD_DIR" "$@" -e ".[$extras]"
    run_logged python -m leanstream_gguf.link # so that a program may import llama_cpp first
    step "leanstream-gguf: $(python -c 'import importlib.metadata as m; print(m.version("leanstream-gguf"))') installed in .venv"
}

get_demo_model() {
    step "demo model: SmolLM2-135M-Instruct"
    MODEL=$(python scripts/get_demo_model.py 2>>"$LOG") || die "no demo model: $(tail -n 1 "$LOG")"
    export MODEL
}

# set_up EXTRAS [pip options]
set_up() {
    cd "$ROOT" || exit
    mkdir -p build
    : >"$LOG"
    install_system_packages
    make_venv
    install_build_tools
    install_llama_cpp_python
    install_package "$@"
    get_demo_model
}
