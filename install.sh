#!/bin/sh
# Make .venv and install requirements.lock into it: exact versions, checked hashes.
#
#   sh install.sh                   called by `make`
#   sh install.sh dev               also requirements-dev.lock: the packages of the tests and of all extras
#   sh install.sh torch             torch and its CUDA packages only, again: after a change of CUDA= below
#   sh install.sh pillow            Pillow or Pillow-SIMD only: after a change of PILLOW= below
#   sh install.sh wheelhouse DIR    downloads the packages of requirements.lock into DIR. On a machine without internet access that has
#                                   the same CPU type and Python: WHEELHOUSE=DIR sh install.sh
#   sh install.sh lock              resolves pyproject.toml into both locks again
#
# PYTHON=/path/to/python chooses the interpreter. Otherwise this is python3, or another in PATH that is 3.11 or newer and has venv.
# If none exists, uv downloads one into .cache. PIP_INDEX_URL=URL is a mirror of the package index, also for uv.
# uv's cache is .cache/uv, so it is on the file system of .venv. UV_CACHE_DIR=DIR shares one cache between checkouts.
#
# CUDA=cu126 installs torch, torchvision and their GPU packages from torch's own index, without hashes. torch and torchvision keep their
# versions in the lock; all other packages stay as in the lock. Other values are cu128, cpu, rocm6.4 and so on, as for `uv pip install
# --torch-backend`. TORCH_INDEX=URL is a mirror of that index. .venv/cuda keeps the choice; CUDA=lock returns to the lock's own build.
#
# Pillow-SIMD replaces Pillow on x86-64 (same PIL module, never both). It is built with AVX2 if the CPU has it.
# If a compiler or the JPEG headers are missing, this script names them and installs Pillow from the same lock.
# Pillow-SIMD resizes faster, but lacks Pillow's security fixes since 12.2 (docs/data.md). PILLOW=plain installs Pillow, PILLOW=simd
# returns to Pillow-SIMD. .venv/pil keeps the choice.
# A .venv that does not run, or has another Python than PYTHON, is made again; any other is updated.
set -eu
CALLER=$PWD
cd "$(dirname "$0")"
VENV=.venv
export UV_CACHE_DIR="${UV_CACHE_DIR:-$PWD/.cache/uv}"

say() { printf '%s\n' "install: $*" >&2; }
die() { say "$*"; exit 1; }
absolute() { case $1 in /*) echo "$1" ;; *) echo "$CALLER/$1" ;; esac; }

# Use the same index, or only the files of WHEELHOUSE, in pip and uv. uv does not read pip's variables.
set_index() {
    INDEX=${UV_DEFAULT_INDEX:-${PIP_INDEX_URL:-}}
    [ -z "$INDEX" ] || export UV_DEFAULT_INDEX="$INDEX" PIP_INDEX_URL="$INDEX"
    [ -n "${WHEELHOUSE:-}" ] || return 0
    WHEELHOUSE=$(absolute "$WHEELHOUSE")
    [ -d "$WHEELHOUSE" ] || die "WHEELHOUSE=$WHEELHOUSE is not a folder. Make it with: sh install.sh wheelhouse DIR"
    export UV_OFFLINE=1 UV_FIND_LINKS="$WHEELHOUSE" PIP_NO_INDEX=1 PIP_FIND_LINKS="$WHEELHOUSE"
}

# Print one package of the lock, without its platform marker: lock_block NAME.
lock_block() { sed -n "/^$1==/,/[^\\\\]\$/p" requirements.lock | sed "1s/ ;.*\\\\/ \\\\/"; }

# Print the packages of a lock from torch's own index, or all others.
FAMILY='torch|torchvision|(pytorch-)?triton[a-z-]*|cuda-[a-z-]*|nvidia-[a-z0-9-]*'
family_in() { awk -v family="^($FAMILY)==" '/^[a-z].*==/ { is_ours = $0 ~ family } is_ours' "$1"; }
outside_family() { awk -v family="^($FAMILY)==" '/^[a-z].*==/ { is_ours = $0 ~ family } !is_ours' "$@"; }

number_of() { "$1" -c 'import sys; print(*sys.version_info[:2])'; }
is_usable() { "$1" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }

# Download a Python with uv. If uv is not in PATH, get it with pip of an older Python.
bring_python() {
    say "PATH has no Python 3.11 or newer with venv. Downloading Python 3.12 into .cache"
    export UV_PYTHON_INSTALL_DIR="$PWD/.cache/python" UV_PYTHON_INSTALL_BIN=0 UV_PYTHON_PREFERENCE=only-managed
    uv=$(command -v uv) || {
        mkdir -p .cache
        lock_block uv > .cache/uv.lock
        uv=.cache/uv-program/bin/uv
        python3 -m pip install --quiet --upgrade --target .cache/uv-program --require-hashes -r .cache/uv.lock >&2 || uv=
    }
    if [ -z "$uv" ] || ! "$uv" python install --quiet 3.12 || ! PYTHON=$("$uv" python find 3.12); then
        die "Python cannot be downloaded. Install Python 3.11 or newer with venv (Debian: apt-get install python3-venv), or set PYTHON=/path/to/python3."
    fi
}

find_python() {
    if [ -n "${PYTHON:-}" ]; then
        is_usable "$PYTHON" || die "PYTHON=$PYTHON is not Python 3.11 or newer with venv (Debian: apt-get install python3-venv)."
        return
    fi
    for PYTHON in python3 python3.13 python3.12 python3.11; do
        ! is_usable "$PYTHON" || return 0
    done
    bring_python
}

make_venv() {
    if ! $VENV/bin/python -c 'import pip, sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null ||
        { [ -n "${PYTHON:-}" ] && [ "$(number_of "$PYTHON")" != "$(number_of $VENV/bin/python)" ]; }; then
        find_python
        "$PYTHON" -m venv --clear $VENV || die "$VENV cannot be made with $PYTHON (see above)."
    fi
    lock_block uv > $VENV/uv.lock
    $VENV/bin/python -m pip install --quiet --disable-pip-version-check --require-hashes -r $VENV/uv.lock
}

# Print the missing requirement of a build of Pillow-SIMD, or nothing.
missing_for_simd() {
    command -v cc >/dev/null 2>&1 || { echo "a C compiler (Debian: apt-get install gcc libc6-dev)"; return; }
    printf '#include <stdio.h>\n#include <jpeglib.h>\n#include <zlib.h>\nint main(void){return 0;}\n' |
        cc -x c -fsyntax-only - 2>/dev/null || echo "JPEG and zlib headers (Debian: apt-get install libjpeg-dev zlib1g-dev)"
    include=$($VENV/bin/python -c 'import sysconfig; print(sysconfig.get_path("include"))')
    [ -e "$include/Python.h" ] || echo "Python's headers (Debian: apt-get install python3-dev)"
}

# Install one of the two in place of the other, because both own the same files: take_pil NAME UV_OPTIONS... It runs in another directory,
# because an override in pyproject.toml (plain Pillow only for other machines) would skip Pillow.
take_pil() {
    lock_block "$1" > $VENV/pillow.lock
    for name in pillow pillow-simd; do
        [ "$name" = "$1" ] || $VENV/bin/uv pip uninstall --quiet --python $VENV "$name"
    done
    shift
    $VENV/bin/uv pip install --quiet --directory / --python "$PWD/$VENV" --no-deps --require-hashes "$@" -r "$PWD/$VENV/pillow.lock"
}

install_pillow() {
    chosen=${PILLOW:-$(cat $VENV/pil 2>/dev/null || echo simd)}
    case $chosen in
        simd) ;;
        plain) take_pil pillow --reinstall-package pillow; echo plain > $VENV/pil; return ;;
        *) say "PILLOW=$chosen is not valid. Use PILLOW=plain or PILLOW=simd."; exit 2 ;;
    esac
    echo simd > $VENV/pil
    missing=$(missing_for_simd)
    if [ "$(uname -m)" != x86_64 ]; then
        missing="an x86-64 CPU"
    elif [ -z "$missing" ]; then
        # uv's cache key ignores CC: a cached wheel may lack AVX2, so it is built again.
        if grep -qw avx2 /proc/cpuinfo; then CC="cc -mavx2"; else CC=cc; fi
        export CC
        say "building Pillow-SIMD, which takes a minute or two"
        take_pil pillow-simd --no-cache --no-binary pillow-simd --reinstall-package pillow-simd 2> $VENV/pillow-simd.log && return 0
        missing="a working build (see $VENV/pillow-simd.log)"
    fi
    say "Pillow-SIMD cannot be built. Missing: $missing"
    say "installing plain Pillow instead (slower resizing). To change this, install the missing part, then run sh install.sh"
    take_pil pillow --reinstall-package pillow
}

# True if Pillow-SIMD of this lock works: building it takes a minute.
has_simd() {
    locked=$(sed -n 's/^pillow-simd==\([^ ]*\).*/\1/p' requirements.lock)
    [ -z "${PILLOW:-}" ] && $VENV/bin/python -c "import PIL.Image; raise SystemExit(PIL.__version__ != '$locked')" 2>/dev/null
}

# Set BUILD to the requested build, or the last one; "lock" is the build of requirements.lock.
choose_build() {
    case ${CUDA:-} in */*) say "CUDA=$CUDA is a path, not a build, and is ignored"; CUDA= ;; esac
    BUILD=${CUDA:-$(cat $VENV/cuda 2>/dev/null || echo lock)}
    case $BUILD in
        lock | cpu | xpu | cu[0-9]* | rocm[0-9]*) ;;
        *) say "CUDA=$BUILD is not a build of torch. Use cu126, cu128, cu130, cpu, rocm6.4, ..., or lock."; exit 2 ;;
    esac
}

# Warn before the download if the NVIDIA driver is too old for the build. cluster/check.py has the versions; an image lacks this file.
check_driver() {
    case $BUILD in
        cu*) cuda=${BUILD#cu}; cuda=${cuda%?}.${cuda##"${cuda%?}"} ;;
        lock) cuda=$(sed -n 's/^cuda-toolkit==\([0-9]*\.[0-9]*\).*/\1/p' requirements.lock) ;;
        *) return 0 ;;
    esac
    [ ! -e cluster/check.py ] || $VENV/bin/python -c 'import os, sys
from cluster.check import compare_driver, find_driver
driver = find_driver(os.environ)
finding = driver and compare_driver(driver, sys.argv[1])
if finding and finding.fix: print(f"install: warning: {finding.text}. Fix: {finding.fix}", file=sys.stderr)' "$cuda" || true
}

# Write $VENV/torch.lock for BUILD, and set SOURCE to the options for its index.
choose_torch() {
    family_in requirements.lock > $VENV/torch.lock
    SOURCE=--require-hashes
    [ "$BUILD" != lock ] || return 0
    # with the build's own suffix, so that no other index gives another build; other packages keep their versions
    outside_family requirements.lock | sed -n '/^[a-z].*==/s/ *\\*$//p' > $VENV/constraints.lock
    sed -n "s/^\(torch==\|torchvision==\)\([^ ]*\).*/\1\2+$BUILD/p" $VENV/torch.lock > $VENV/torch.in
    say "looking for $(tr '\n' ' ' < $VENV/torch.in)"
    if [ -n "${WHEELHOUSE:-}" ]; then SOURCE=
    elif [ -n "${TORCH_INDEX:-}" ]; then SOURCE="--index $TORCH_INDEX"
    else SOURCE="--torch-backend $BUILD"; fi
    # shellcheck disable=SC2086 # a list of words
    $VENV/bin/uv pip compile --quiet --python $VENV --no-annotate --constraints $VENV/constraints.lock $SOURCE $VENV/torch.in \
        --output-file $VENV/torch.all > $VENV/torch.log ||
        die "this build is not available (see above). Set CUDA= to another build, CUDA=lock, or TORCH_INDEX= to a mirror."
    family_in $VENV/torch.all > $VENV/torch.lock
    say "not checked against a hash: $(tr '\n' ' ' < $VENV/torch.lock)"
}

install_torch() {
    check_driver
    choose_torch
    rm -f $VENV/.installed $VENV/.dev
    if [ "$BUILD" != "$(cat $VENV/cuda 2>/dev/null || echo lock)" ]; then # each build has its own packages of gigabytes
        $VENV/bin/uv pip freeze --python $VENV | grep -E "^($FAMILY)==" | cut -d= -f1 |
            xargs -r $VENV/bin/uv pip uninstall --quiet --python $VENV
    fi
    # shellcheck disable=SC2086 # a list of words
    $VENV/bin/uv pip install --python $VENV --no-deps --compile-bytecode $SOURCE -r $VENV/torch.lock
    echo "$BUILD" > $VENV/cuda
}

# install_all [requirements-dev.lock]
install_all() {
    make_venv
    choose_build
    say "installing $(cat requirements.lock "$@" | grep -c '^[a-z].*==') locked packages (the CUDA build of torch is 3 GB and also runs on CPUs)"
    # everything but PIL; the pillow-simd line of the lock would reuse a cached wheel, see install_pillow
    sed '/^pillow/,/[^\]$/d' requirements.lock > $VENV/all.lock
    outside_family $VENV/all.lock "$@" > $VENV/others.lock
    $VENV/bin/uv pip install --python $VENV --no-deps --require-hashes --compile-bytecode -r $VENV/others.lock
    install_torch
    has_simd || install_pillow
    $VENV/bin/python -c 'import PIL.Image'
    # cluster/image.sh installs the packages before the image has the code
    [ ! -d data_prep ] || $VENV/bin/uv pip install --quiet --python $VENV --no-deps --no-build-isolation --editable .
    touch $VENV/.installed
    say "done: $($VENV/bin/python -c 'import PIL; print("PIL", PIL.__version__)')"
}

# Download each file of requirements.lock for this Python and CPU type, with both Pillows, into a folder. Source packages stay as they are,
# so the lock's hashes also hold where they are built.
fill_wheelhouse() {
    make_venv
    choose_build
    choose_torch
    { sed '/^pillow==/,/[^\]$/d' requirements.lock; lock_block pillow; } > $VENV/wheels.lock
    if [ "$BUILD" != lock ]; then
        [ -n "${TORCH_INDEX:-}" ] || die "TORCH_INDEX is required for a wheelhouse with CUDA=$BUILD: the URL of the index for this build."
        outside_family $VENV/wheels.lock > $VENV/others.lock
        mv $VENV/others.lock $VENV/wheels.lock
        download_to "$1" --extra-index-url "$TORCH_INDEX" -r $VENV/torch.lock
    fi
    download_to "$1" --require-hashes -r $VENV/wheels.lock
    say "done: $(find "$1" -type f | wc -l) files. On the other machine: WHEELHOUSE=DIR sh install.sh, with Python $(number_of $VENV/bin/python | tr ' ' .)"
}
download_to() {
    folder=$1; shift
    $VENV/bin/python -m pip download --disable-pip-version-check --no-deps --dest "$folder" "$@" >&2
}

# Resolve the project with all extras and the packages of the tests; then with the extras of users: images and clouds need s3, and
# `finetune export` writes ONNX by default. requirements-dev.lock is the difference.
make_lock() {
    cat requirements.lock requirements-dev.lock > $VENV/complete.lock # present versions are kept
    resolve $VENV/complete.lock --group dev --all-extras "$@"
    cp $VENV/complete.lock requirements.lock
    resolve requirements.lock --extra remote --extra onnx
    awk 'NR == FNR { users[$0]; next } /^[a-z].*==/ { is_extra = !($0 in users) } /^#/ || is_extra' \
        requirements.lock $VENV/complete.lock > requirements-dev.lock
}
resolve() {
    file=$1; shift
    $VENV/bin/uv pip compile --quiet pyproject.toml --group install --universal --generate-hashes --python-version 3.11 \
        --no-annotate --custom-compile-command "sh install.sh lock" --output-file "$file" "$@"
}

[ "$(uname -s)" = Linux ] ||
    die "$(uname -s) is not supported. Use a Linux machine, or a container: podman build --platform linux/amd64 -f cluster/Containerfile -t wide-mlps ."
set_index
case ${1:-install} in
    install) install_all ;;
    dev) install_all requirements-dev.lock; touch $VENV/.dev ;;
    torch) choose_build; install_torch; touch $VENV/.installed ;;
    pillow) install_pillow ;;
    wheelhouse) [ $# = 2 ] || { say "wheelhouse needs a folder: sh install.sh wheelhouse DIR"; exit 2; }
        fill_wheelhouse "$(absolute "$2")" ;;
    lock) shift; make_lock "$@" ;;
    *) say "$1 is not a command. Use install, dev, torch, pillow, wheelhouse or lock."; exit 2 ;;
esac
