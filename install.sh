#!/bin/sh
# Makes .venv and installs requirements.lock into it: exact versions, checked hashes.
#
#   sh install.sh            what `make` calls; PYTHON=/path/to/python3.11+ picks the interpreter
#   sh install.sh lock       resolves pyproject.toml anew into requirements.lock
#
# Pillow-SIMD takes the place of Pillow (same PIL module, never both). It is built here, with AVX2 where the CPU has
# it; where a compiler or the JPEG headers are missing, this says what to install and takes Pillow from the same lock.
# A .venv that does not run, or is of another Python than PYTHON names, is made anew; any other is mended.
set -eu
cd "$(dirname "$0")"
ASKED=${PYTHON:-}
PYTHON=${PYTHON:-python3}
VENV=.venv

say() { printf '%s\n' "install: $*" >&2; }

# lock_block NAME prints one package of the lock, without its platform marker.
lock_block() { sed -n "/^$1==/,/[^\\\\]\$/p" requirements.lock | sed "1s/ ;.*\\\\/ \\\\/"; }

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

# take_pil NAME UV_OPTIONS... installs it in the place of the other one: both own the same files.
take_pil() {
    lock_block "$1" > $VENV/pillow.lock
    for name in pillow pillow-simd; do
        [ "$name" = "$1" ] || $VENV/bin/uv pip uninstall --quiet --python $VENV "$name"
    done
    shift
    $VENV/bin/uv pip install --quiet --python $VENV --no-deps --require-hashes "$@" -r $VENV/pillow.lock
}

install_pillow() {
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

install_all() {
    make_venv
    say "installing $(grep -c '^[a-z].*==' requirements.lock) locked packages (the CUDA build of torch is 3 GB; it serves CPUs too)"
    # everything but PIL first; the lock's own pillow-simd line would reuse a cached wheel, see install_pillow
    sed '/^pillow/,/[^\\]$/d' requirements.lock > $VENV/all.lock
    $VENV/bin/uv pip install --python $VENV --no-deps --require-hashes --compile-bytecode -r $VENV/all.lock
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
    lock) shift; make_lock "$@" ;;
    *) say "unknown word: $1 (install | lock)"; exit 2 ;;
esac
