#!/bin/sh
# Make .venv and install requirements.lock into it: exact versions, checked hashes.
#
#   sh install.sh            called by `make`; PYTHON=/path/to/python3.11+ chooses the interpreter
#   sh install.sh torch      torch and its CUDA packages only, again: after a change of CUDA= below
#   sh install.sh pillow     Pillow or Pillow-SIMD only: after a change of PILLOW= below
#   sh install.sh lock       resolves pyproject.toml into requirements.lock again
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
cd "$(dirname "$0")"
ASKED=${PYTHON:-}
PYTHON=${PYTHON:-python3}
VENV=.venv

say() { printf '%s\n' "install: $*" >&2; }

# Print one package of the lock, without its platform marker: lock_block NAME.
lock_block() { sed -n "/^$1==/,/[^\\\\]\$/p" requirements.lock | sed "1s/ ;.*\\\\/ \\\\/"; }

# Print the packages of a lock from torch's own index, or all others.
FAMILY='torch|torchvision|(pytorch-)?triton[a-z-]*|cuda-[a-z-]*|nvidia-[a-z0-9-]*'
family_in() { awk -v family="^($FAMILY)==" '/^[a-z].*==/ { is_ours = $0 ~ family } is_ours' "$1"; }
outside_family() { awk -v family="^($FAMILY)==" '/^[a-z].*==/ { is_ours = $0 ~ family } !is_ours' "$1"; }

number_of() { "$1" -c 'import sys; print(*sys.version_info[:2])'; }

make_venv() {
    "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null ||
        { say "Python 3.11 or newer is required. Set PYTHON=/path/to/python3."; exit 1; }
    $VENV/bin/python -m pip --version >/dev/null 2>&1 && [ "$(number_of "${ASKED:-$VENV/bin/python}")" = "$(number_of $VENV/bin/python)" ] ||
        "$PYTHON" -m venv --clear $VENV ||
        { say "$VENV cannot be made. On Debian: apt-get install python3-venv"; exit 1; }
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
        say "building Pillow-SIMD, a minute or two"
        take_pil pillow-simd --no-cache --no-binary pillow-simd --reinstall-package pillow-simd 2> $VENV/pillow-simd.log && return 0
        missing="a working build (see $VENV/pillow-simd.log)"
    fi
    say "Pillow-SIMD cannot be built. Missing: $missing"
    say "installing plain Pillow instead (slower resizing). To change this, install the missing part, then run sh install.sh"
    take_pil pillow --reinstall-package pillow
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

install_torch() {
    family_in requirements.lock > $VENV/torch.lock
    if [ "$BUILD" = lock ]; then
        set -- --require-hashes
    else
        # with the build's own suffix, so that no other index gives another build; other packages keep their versions
        outside_family requirements.lock | sed -n '/^[a-z].*==/s/ *\\*$//p' > $VENV/constraints.lock
        sed -n "s/^\(torch==\|torchvision==\)\([^ ]*\).*/\1\2+$BUILD/p" $VENV/torch.lock > $VENV/torch.in
        say "looking for $(tr '\n' ' ' < $VENV/torch.in)"
        if [ -n "${TORCH_INDEX:-}" ]; then set -- --index "$TORCH_INDEX"; else set -- --torch-backend "$BUILD"; fi
        $VENV/bin/uv pip compile --quiet --python $VENV --no-annotate --constraints $VENV/constraints.lock "$@" $VENV/torch.in \
            --output-file $VENV/torch.all > $VENV/torch.log || {
            say "this build is not available (see above). Set CUDA= to another build, CUDA=lock, or TORCH_INDEX= to a mirror."
            exit 1
        }
        family_in $VENV/torch.all > $VENV/torch.lock
        say "without a hash: $(tr '\n' ' ' < $VENV/torch.lock)"
    fi
    rm -f $VENV/.installed
    if [ "$BUILD" != "$(cat $VENV/cuda 2>/dev/null || echo lock)" ]; then # each build has its own packages of gigabytes
        $VENV/bin/uv pip freeze --python $VENV | grep -E "^($FAMILY)==" | cut -d= -f1 |
            xargs -r $VENV/bin/uv pip uninstall --quiet --python $VENV
    fi
    $VENV/bin/uv pip install --python $VENV --no-deps --compile-bytecode "$@" -r $VENV/torch.lock
    echo "$BUILD" > $VENV/cuda
}

install_all() {
    make_venv
    choose_build
    say "installing $(grep -c '^[a-z].*==' requirements.lock) locked packages (the CUDA build of torch is 3 GB and also runs on CPUs)"
    # everything but PIL; the pillow-simd line of the lock would reuse a cached wheel, see install_pillow
    sed '/^pillow/,/[^\\]$/d' requirements.lock > $VENV/all.lock
    outside_family $VENV/all.lock > $VENV/others.lock
    $VENV/bin/uv pip install --python $VENV --no-deps --require-hashes --compile-bytecode -r $VENV/others.lock
    install_torch
    install_pillow
    $VENV/bin/python -c 'import PIL.Image'
    $VENV/bin/uv pip install --quiet --python $VENV --no-deps --no-build-isolation --editable .
    touch $VENV/.installed
    say "done: $($VENV/bin/python -c 'import PIL; print("PIL", PIL.__version__)')"
}

make_lock() {
    $VENV/bin/uv pip compile --quiet pyproject.toml --group dev --group simd --all-extras --universal --generate-hashes --python-version 3.11 \
        --no-annotate --custom-compile-command "sh install.sh lock" --output-file requirements.lock "$@"
}

case ${1:-install} in
    install) install_all ;;
    torch) choose_build; install_torch; touch $VENV/.installed ;;
    pillow) install_pillow ;;
    lock) shift; make_lock "$@" ;;
    *) say "$1 is not a command. Use install, torch, pillow or lock."; exit 2 ;;
esac
