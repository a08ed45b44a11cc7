#!/bin/sh
# Makes .venv and installs requirements.lock into it: exact versions, checked hashes.
#
#   sh install.sh            what `make` calls; PYTHON=/path/to/python3.11+ picks the interpreter
#   sh install.sh torch      torch's family alone, anew: after CUDA= below has changed
#   sh install.sh pillow     Pillow or Pillow-SIMD only: after PILLOW= below has changed
#   sh install.sh lock       resolves pyproject.toml anew into requirements.lock
#
# CUDA=cu126 (cu128, cpu, rocm6.4, ... : the words of `uv pip install --torch-backend`) takes torch, torchvision and what they bring
# for the GPU from torch's own index, at the lock's versions of the two, but without hashes; all else stays as it is in the lock.
# TORCH_INDEX=URL is a mirror of that index. The choice is kept in .venv/cuda; CUDA=lock returns to the lock's own build.
#
# Pillow-SIMD takes the place of Pillow on x86-64 (same PIL module, never both). It is built with AVX2 if the CPU has it.
# If a compiler or the JPEG headers are missing, this script names them and takes Pillow from the same lock.
# Pillow-SIMD resizes faster, but lacks Pillow's security fixes since 12.2 (docs/data.md). PILLOW=plain takes Pillow, PILLOW=simd
# returns to Pillow-SIMD. The choice is kept in .venv/pil.
# A .venv that does not run, or is of another Python than PYTHON names, is made anew; any other is mended.
set -eu
cd "$(dirname "$0")"
ASKED=${PYTHON:-}
PYTHON=${PYTHON:-python3}
VENV=.venv

say() { printf '%s\n' "install: $*" >&2; }

# lock_block NAME prints one package of the lock, without its platform marker.
lock_block() { sed -n "/^$1==/,/[^\\\\]\$/p" requirements.lock | sed "1s/ ;.*\\\\/ \\\\/"; }

# Of a lock: what comes from torch's own index, and all else.
FAMILY='torch|torchvision|(pytorch-)?triton[a-z-]*|cuda-[a-z-]*|nvidia-[a-z0-9-]*'
family_in() { awk -v family="^($FAMILY)==" '/^[a-z].*==/ { is_ours = $0 ~ family } is_ours' "$1"; }
outside_family() { awk -v family="^($FAMILY)==" '/^[a-z].*==/ { is_ours = $0 ~ family } !is_ours' "$1"; }

number_of() { "$1" -c 'import sys; print(*sys.version_info[:2])'; }

make_venv() {
    "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null ||
        { say "Python 3.11 or newer is needed; set PYTHON=/path/to/python3"; exit 1; }
    $VENV/bin/python -m pip --version >/dev/null 2>&1 && [ "$(number_of "${ASKED:-$VENV/bin/python}")" = "$(number_of $VENV/bin/python)" ] ||
        "$PYTHON" -m venv --clear $VENV ||
        { say "could not make $VENV; on Debian: apt-get install python3-venv"; exit 1; }
    lock_block uv > $VENV/uv.lock
    $VENV/bin/python -m pip install --quiet --disable-pip-version-check --require-hashes -r $VENV/uv.lock
}

# Prints what building Pillow-SIMD lacks here; nothing when it can be built.
missing_for_simd() {
    command -v cc >/dev/null 2>&1 || { echo "a C compiler (Debian: apt-get install gcc libc6-dev)"; return; }
    printf '#include <stdio.h>\n#include <jpeglib.h>\n#include <zlib.h>\nint main(void){return 0;}\n' |
        cc -x c -fsyntax-only - 2>/dev/null || echo "JPEG and zlib headers (Debian: apt-get install libjpeg-dev zlib1g-dev)"
    include=$($VENV/bin/python -c 'import sysconfig; print(sysconfig.get_path("include"))')
    [ -e "$include/Python.h" ] || echo "Python's headers (Debian: apt-get install python3-dev)"
}

# take_pil NAME UV_OPTIONS... installs it in the place of the other one: both own the same files. From another directory, or the override in
# pyproject.toml, by which the lock has plain Pillow for other machines alone, would leave it out here.
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
        missing="an x86-64 CPU, which it is written for"
    elif [ -z "$missing" ]; then
        # uv leaves CC out of its cache key: a wheel cached without AVX2 would be taken silently, so it is built anew.
        if grep -qw avx2 /proc/cpuinfo; then CC="cc -mavx2"; else CC=cc; fi
        export CC
        say "building Pillow-SIMD, a minute or two"
        take_pil pillow-simd --no-cache --no-binary pillow-simd --reinstall-package pillow-simd 2> $VENV/pillow-simd.log && return 0
        missing="a working build (see $VENV/pillow-simd.log)"
    fi
    say "Pillow-SIMD cannot be built here; missing: $missing"
    say "taking plain Pillow instead (slower resizing). To change that: install it, then sh install.sh"
    take_pil pillow --reinstall-package pillow
}

# The build that is asked for, or was the last time; "lock" is the one in requirements.lock.
choose_build() {
    case ${CUDA:-} in */*) say "CUDA=$CUDA is a path, which names no build: ignored"; CUDA= ;; esac
    BUILD=${CUDA:-$(cat $VENV/cuda 2>/dev/null || echo lock)}
    case $BUILD in
        lock | cpu | xpu | cu[0-9]* | rocm[0-9]*) ;;
        *) say "CUDA=$BUILD names no build of torch; cu126, cu128, cu130, cpu, rocm6.4, ..., or lock"; exit 2 ;;
    esac
}

install_torch() {
    family_in requirements.lock > $VENV/torch.lock
    if [ "$BUILD" = lock ]; then
        set -- --require-hashes
    else
        # with the build's own mark, so that no other index can answer with another build; all else may not move
        outside_family requirements.lock | sed -n '/^[a-z].*==/s/ *\\*$//p' > $VENV/constraints.lock
        sed -n "s/^\(torch==\|torchvision==\)\([^ ]*\).*/\1\2+$BUILD/p" $VENV/torch.lock > $VENV/torch.in
        say "looking for $(tr '\n' ' ' < $VENV/torch.in)"
        if [ -n "${TORCH_INDEX:-}" ]; then set -- --index "$TORCH_INDEX"; else set -- --torch-backend "$BUILD"; fi
        $VENV/bin/uv pip compile --quiet --python $VENV --no-annotate --constraints $VENV/constraints.lock "$@" $VENV/torch.in \
            --output-file $VENV/torch.all > $VENV/torch.log || {
            say "no such build could be had (see above): CUDA= takes another, CUDA=lock the lock's own, TORCH_INDEX= a mirror"
            exit 1
        }
        family_in $VENV/torch.all > $VENV/torch.lock
        say "without a hash: $(tr '\n' ' ' < $VENV/torch.lock)"
    fi
    rm -f $VENV/.installed
    if [ "$BUILD" != "$(cat $VENV/cuda 2>/dev/null || echo lock)" ]; then # each build brings packages of its own, of gigabytes
        $VENV/bin/uv pip freeze --python $VENV | grep -E "^($FAMILY)==" | cut -d= -f1 |
            xargs -r $VENV/bin/uv pip uninstall --quiet --python $VENV
    fi
    $VENV/bin/uv pip install --python $VENV --no-deps --compile-bytecode "$@" -r $VENV/torch.lock
    echo "$BUILD" > $VENV/cuda
}

install_all() {
    make_venv
    choose_build
    say "installing $(grep -c '^[a-z].*==' requirements.lock) locked packages (the CUDA build of torch is 3 GB; it serves CPUs too)"
    # everything but PIL first; the lock's own pillow-simd line would reuse a cached wheel, see install_pillow
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
    *) say "unknown word: $1 (install | torch | pillow | lock)"; exit 2 ;;
esac
