#!/bin/sh
# SPDX-License-Identifier: MIT
#
# From a fresh clone to a result, on Debian 12, Debian 13 or Ubuntu 24.04 (root or sudo):
#
#   cmake/quickstart.sh train [OPTIONS of bellows train]   trains the demo model on 4 ranks, in FP8,
#                                                          through DualPipe
#   cmake/quickstart.sh test  [quick]                      builds and runs the tests on a current
#                                                          lavapipe; then, unless quick, with
#                                                          sanitizers and with an old shader compiler
#                                                          on the distribution's
#   cmake/quickstart.sh bench [NAME] [OPTIONS of bench_*]  runs the benchmarks named bench_*NAME*, by
#                                                          default all, on the CPU; --json FOLDER:
#                                                          results for bench/compare.py, by default
#                                                          in build/bench
#
# Installs packages, makes the private toolchain folder, builds. May be run again: then it does only
# what is missing. Details stand in build/log/.
set -eu

cd "$(dirname "$0")/.."
log_folder=build/log
mkdir -p "$log_folder"
started=$(date +%s)
goal=${1:-}
case $goal in
train | test | bench) shift ;;
*)
    sed -n '4,18s/^# \{0,1\}//p' "$0" >&2
    exit 2
    ;;
esac

# --- saying what is done --------------------------------------------------------------------------
finish() {
    status=$1
    shift
    echo "quickstart: $* ($(($(date +%s) - started)) s)"
    exit "$status"
}

# phase NAME TEXT COMMAND...: one line; the output goes to build/log/NAME.log, its end is shown
# when the command fails.
phase() {
    name=$1
    text=$2
    shift 2
    phase_started=$(date +%s)
    printf '%s ... ' "$text"
    if "$@" >"$log_folder/$name.log" 2>&1; then
        echo "done ($(($(date +%s) - phase_started)) s)"
    else
        echo "FAILED ($(($(date +%s) - phase_started)) s); from $log_folder/$name.log:"
        # Ninja goes on to finish what runs, so the cause is not at the end.
        if grep -q '^FAILED: ' "$log_folder/$name.log"; then
            sed -n '/^FAILED: /,$p' "$log_folder/$name.log" | cut -c1-2000 | head -n 40
        else
            tail -n 40 "$log_folder/$name.log"
        fi
        finish 1 "$goal FAILED at: $text"
    fi
}

# --- packages -------------------------------------------------------------------------------------
packages="g++ make cmake ninja-build patchelf ccache ca-certificates git
 libvulkan1 mesa-vulkan-drivers vulkan-validationlayers
 libopenmpi-dev openmpi-bin openssh-client
 nlohmann-json3-dev libcli11-dev libtomlplusplus-dev zlib1g-dev libdlpack-dev
 libsentencepiece-dev libpcre2-dev libutf8proc-dev
 libgtest-dev libbenchmark-dev"
# The portable build is tested with the distribution's own glslc, which is old, and with Clang.
[ "$goal" != test ] || packages="$packages clang-format-19 clang-19 glslc iproute2 pkgconf"

as_root() {
    if [ "$(id -u)" -eq 0 ]; then
        env DEBIAN_FRONTEND=noninteractive "$@"
    else
        sudo env DEBIAN_FRONTEND=noninteractive "$@"
    fi
}

install_packages() {
    as_root apt-get update && as_root apt-get install -y --no-install-recommends $missing
}

if command -v apt-get >/dev/null && command -v dpkg-query >/dev/null; then
    missing=
    for package in $packages; do
        dpkg-query -W -f='${db:Status-Status}\n' "$package" 2>/dev/null | grep -qx installed ||
            missing="$missing $package"
    done
    if [ -n "$missing" ]; then
        if [ "$(id -u)" -ne 0 ] && ! command -v sudo >/dev/null; then
            echo "These packages are missing, and this is neither root nor is there sudo:$missing"
            finish 1 "$goal FAILED: ask an administrator for: apt-get install$missing"
        fi
        phase packages "Installing $(echo $missing | wc -w) packages" install_packages
    fi
else
    missing=
    for program in c++ cmake ninja patchelf mpirun mpicc git; do
        command -v "$program" >/dev/null || missing="$missing $program"
    done
    echo "Packages are installed on Debian and Ubuntu only. Bellows needs, elsewhere by hand:"
    echo "  a C++20 compiler, CMake >= 3.25, Ninja, an MPI, Vulkan headers >= 1.4, volk, Vulkan"
    echo "  Memory Allocator, glslc or glslangValidator, SPIRV-Tools, nlohmann-json, CLI11, toml++,"
    echo "  sentencepiece, PCRE2 >= 10.40, utf8proc, zlib, DLPack's header, GoogleTest, Google"
    echo "  Benchmark; then: cmake --preset release"
    [ -z "$missing" ] || echo "Programs missing here:$missing"
    finish 1 "$goal FAILED: no apt on this system"
fi

# --- toolchain, build -----------------------------------------------------------------------------
if ! ./cmake/toolchain.sh >"$log_folder/toolchain.log" 2>&1; then
    cat "$log_folder/toolchain.log"
    finish 1 "$goal FAILED: the private toolchain folder could not be made"
fi
grep -v '^toolchain: fetching' "$log_folder/toolchain.log" || true
echo "Tools: $(sed -n -e 's/^\(glslc\|libvulkan-dev\|mesa-vulkan-drivers\) /\1 /p' \
    build/toolchain/versions.txt | paste -s -d, | sed 's/,/, /g') (build/toolchain/versions.txt)"

jobs=$(nproc)
export CCACHE_SLOPPINESS=pch_defines,time_macros # or it keeps nothing that precompiled headers enter
export CCACHE_BASEDIR="$PWD" CCACHE_NOHASHDIR=1 # clones in other folders share it
# Shaders are compiled once for all builds that have the same compiler (cmake/compile_shader.sh).
export BELLOWS_SHADER_CACHE="${BELLOWS_SHADER_CACHE-${XDG_CACHE_HOME:-$HOME/.cache}/bellows/shaders}"
[ ! -d "$BELLOWS_SHADER_CACHE" ] || find "$BELLOWS_SHADER_CACHE" -type f -mtime +30 -delete
build() { # PRESET [CMAKE OPTIONS...]
    preset=$1
    shift
    phase "$preset-configure" "Configuring $preset" cmake --preset "$preset" \
        -DBELLOWS_PRECOMPILE=ON "$@"
    phase "$preset-build" "Building $preset with $jobs jobs" \
        cmake --build "build/$preset" --parallel "$jobs"
}

# The newer lavapipe beside the system's own drivers, in place of the distribution's lavapipe.
with_new_lavapipe() {
    program=$1
    shift
    env VK_ADD_DRIVER_FILES="$PWD/build/toolchain/bellows_lavapipe.json" \
        VK_LOADER_DRIVERS_DISABLE='lvp_icd*' "build/release/bin-new/$program" "$@"
}

# --- goals ----------------------------------------------------------------------------------------
run_train() {
    build release -DBELLOWS_TESTS=OFF -DBELLOWS_BENCH=OFF -DBELLOWS_WERROR=OFF
    echo "Training the demo model"
    case " $* " in
    *" --out"* | *" --resume"*) ;;
    *)
        mkdir -p runs
        set -- --out "runs/demo-$(date +%Y%m%d-%H%M%S)" "$@"
        ;;
    esac
    case " $* " in
    *" --data"* | *" --resume"*) ;;
    *) set -- --data /usr/share/common-licenses "$@" ;;
    esac
    # What is asked for may not go with the demo's layout: it is left out then.
    case " $* " in
    *" --ranks"* | *" --pp"* | *" --dp"* | *" --ep"* | *" --pipeline"* | *" --resume"*) ;;
    *" --micro-batches"* | *" --batch"* | *" --config"*) ;;
    *) set -- --pipeline dualpipe --pp 2 --ep 2 "$@" ;;
    esac
    case " $* " in
    *" --precision"* | *" --resume"*) ;;
    *) set -- --precision fp8 "$@" ;;
    esac
    status=0
    # Of a flag that is given twice the last one counts; --data collects.
    with_new_lavapipe bellows train --config tiny --ranks 4 --device cpu "$@" || status=$?
    [ "$status" -eq 0 ] || finish "$status" "train FAILED with exit code $status"
    finish 0 "train succeeded"
}

# Runs ctest with a line per test; the closing lines are shown last. A second try would hide races,
# so there is none.
run_ctest() { # PRESET CTEST-OPTIONS...
    preset=$1
    shift
    ctest --test-dir "build/$preset" --parallel "$jobs" --output-on-failure --no-tests=error --timeout 600 \
        --output-log "$log_folder/ctest-$preset.log" "$@" ||
        finish 1 "test FAILED in preset $preset (build/log/ctest-$preset.log)"
}

# Each driver has its builds: all of it would take twice as long and show little more. A build by
# hand registers the tests for both (BELLOWS_TEST_DRIVERS).
run_test() {
    build release -DBELLOWS_TESTS=ON -DBELLOWS_BENCH=ON -DBELLOWS_TEST_DRIVERS=new
    if [ "${1:-}" = quick ]; then
        run_ctest release
        finish 0 "test succeeded"
    fi
    # Three ranks run with the sanitizers. What FP8's tests show the validation layer, others do.
    run_ctest release --exclude-regex '\.ranks3$|^validation\.(fp8|model)_'
    build asan -DBELLOWS_BENCH=OFF -DBELLOWS_TEST_DRIVERS=system
    run_ctest asan --label-exclude no-sanitizer
    # An old shader compiler, so portable variants only; no MPI; Clang. Without precompiled
    # headers, which hide that a source lacks one.
    build portable -DBELLOWS_PRECOMPILE=OFF -DBELLOWS_GLSLC="$(command -v glslc)" \
        -DBELLOWS_BENCH=OFF -DBELLOWS_TEST_DRIVERS=system -DCMAKE_CXX_COMPILER=clang++-19
    export BELLOWS_TEST_DEPTH=quick # an old driver: each kernel
    run_ctest portable --label-exclude no-sanitizer
    finish 0 "test succeeded"
}

# One table for all programs, and a file of each in one folder.
run_bench() {
    name=
    case ${1:-} in
    '' | -*) ;;
    *)
        name=$1
        shift
        ;;
    esac
    results=build/bench
    words=$#
    while [ "$words" -gt 0 ]; do
        word=$1
        shift
        words=$((words - 1))
        if [ "$word" = --json ]; then
            [ "$words" -gt 0 ] || finish 2 "bench FAILED: --json needs a folder"
            results=$1
            shift
            words=$((words - 1))
        else
            set -- "$@" "$word"
        fi
    done
    mkdir -p "$results" || finish 2 "bench FAILED: --json $results is no folder"
    build release -DBELLOWS_BENCH=ON -DBELLOWS_WERROR=OFF
    columns=
    for program in build/release/bin-new/bench_*"$name"*; do
        [ -x "$program" ] || continue
        program=$(basename "$program")
        case $program in *_test | bench_expert_exchange | bench_pipeline | bench_serve) continue ;; esac
        status=0
        with_new_lavapipe "$program" $columns --device cpu --json "$results/$program.json" "$@" ||
            status=$?
        [ "$status" -eq 0 ] ||
            finish "$status" "bench FAILED in $program with exit code $status"
        columns=--no-columns
    done
    [ -n "$columns" ] || finish 2 "bench FAILED: no benchmark matches '$name'"
    finish 0 "bench succeeded; compare with another run: bench/compare.py $results OTHER"
}

"run_$goal" "$@"
