#!/bin/sh
# Make .gpu/ in this directory: files that a GPU machine without a network needs, in addition to the working tree. Nothing is installed.
#
#   sh benchmarks/gpu/prepare.sh                         in the checkout to send, after sh install.sh dev
#   sh PROJECT/benchmarks/gpu/prepare.sh --project DIR   in another checkout to send; copies the project to .gpu/project/
#
# .gpu/wheels/     packages that the machine (image.txt) lacks, for Python 3.12, with hashes checked against the locks
# .gpu/commit.txt  commit of the measured code
# You can run the script again. It keeps existing wheels.
set -eu
kit=$(CDPATH='' cd -- "$(dirname "$0")" && pwd)
project=.
limit_mib=64
while [ $# -gt 0 ]; do
    case $1 in
        --project) project=$2; shift 2 ;;
        *) echo "prepare: unknown argument $1" >&2; exit 2 ;;
    esac
done
say() { printf '%s\n' "prepare: $*"; }
die() { printf '%s\n' "prepare: $*" >&2; exit 1; }

grep -qs '^name = "wide-mlps"' "$project/pyproject.toml" || die "$project is not a checkout of wide-mlps. Give --project DIR"
git rev-parse --is-inside-work-tree > /dev/null 2>&1 || die "this directory is not a git checkout. Run the script in the root of the checkout to send"
[ -e .git ] || die "this directory is not the root of its checkout. Run the script in the root"
project=$(CDPATH='' cd -- "$project" && pwd)
python=${PYTHON:-$project/.venv/bin/python}
[ -x "$python" ] || die "$python is missing. Run sh install.sh dev in $project, or set PYTHON"

mkdir -p .gpu/wheels
if ! git check-ignore -q .gpu/x; then  # wide-mlps ignores .gpu/ already
    exclude=$(git rev-parse --git-path info/exclude)
    mkdir -p "$(dirname "$exclude")"; echo '/.gpu/' >> "$exclude"
fi
git -C "$project" describe --always --dirty --abbrev=12 > .gpu/commit.txt

# ---- wheels ------------------------------------------------------------------------------------------------------------
"$python" "$kit/missing.py" "$project/pyproject.toml" "$kit/image.txt" > .gpu/wanted.txt

# lock_block NAME==VERSION prints a package of the lock with its hashes, without its platform marker.
lock_block() { sed -n "/^$1[ ;\\\\]/,/[^\\\\]\$/p" "$project/requirements.lock" "$project/requirements-dev.lock" | sed '1s/ ;.*\\/ \\/'; }

# a-b==1.2 -> a_b-1.2, the first words of a wheel's name
sed 's/==/@/; s/-/_/g; s/@/-/' .gpu/wanted.txt > .gpu/stems.txt

: > .gpu/binary.lock; : > .gpu/source.lock
while read -r wanted <&3 && read -r stem <&4; do
    set -- .gpu/wheels/"$stem"-*.whl
    [ -e "$1" ] && continue
    block=$(lock_block "$wanted")
    [ -n "$block" ] || die "$wanted is not in the locks. Run sh install.sh dev to install the locked versions"
    case $wanted in
        deepspeed==*) printf '%s\n' "$block" >> .gpu/source.lock ;;  # has only a source release
        *) printf '%s\n' "$block" >> .gpu/binary.lock ;;
    esac
done 3< .gpu/wanted.txt 4< .gpu/stems.txt
platforms=$(for tag in manylinux_2_34 manylinux_2_31 manylinux_2_28 manylinux_2_27 manylinux_2_24 manylinux_2_17 manylinux2014 \
    manylinux2010 manylinux_2_5 manylinux1; do printf ' --platform %s_x86_64' "$tag"; done)
pip="$python -m pip --disable-pip-version-check"
if [ -s .gpu/binary.lock ]; then
    say "downloading $(grep -c == .gpu/binary.lock) wheels for Python 3.12"
    # shellcheck disable=SC2086
    $pip download --no-deps --require-hashes --only-binary=:all: --python-version 3.12 --implementation cp $platforms \
        -d .gpu/wheels -r .gpu/binary.lock > .gpu/prepare.log 2>&1 || { tail -5 .gpu/prepare.log >&2; die "the download failed. Read .gpu/prepare.log"; }
fi
if [ -s .gpu/source.lock ]; then
    say "building $(grep -o '^[^ ]*==[^ ]*' .gpu/source.lock) (no compiled operators)"
    # shellcheck disable=SC2086
    DS_BUILD_OPS=0 CUDA_VISIBLE_DEVICES='' $pip wheel --no-deps --require-hashes --no-build-isolation --no-binary deepspeed \
        -w .gpu/wheels -r .gpu/source.lock > .gpu/build.log 2>&1 || { tail -5 .gpu/build.log >&2; die "the build failed. Read .gpu/build.log"; }
fi
for wheel in .gpu/wheels/*.whl; do  # remove wheels of earlier runs: pip fails with two versions of one package
    name=$(basename "$wheel")
    printf '%s' "$name" | cut -d- -f1,2 | grep -qixf .gpu/stems.txt || { say "removing $name, which is no longer needed"; rm "$wheel"; }
done
have=$(find .gpu/wheels -name '*.whl' | wc -l)
[ "$have" -eq "$(wc -l < .gpu/wanted.txt)" ] || die "there are $have wheels for $(wc -l < .gpu/wanted.txt) packages. Compare .gpu/wanted.txt with .gpu/wheels"
rm -f .gpu/binary.lock .gpu/source.lock .gpu/stems.txt

# ---- the project, if another checkout is sent ----------------------------------------------------------------------------
rm -rf .gpu/project
if [ "$project" != "$(pwd)" ]; then
    mkdir .gpu/project
    git -C "$project" ls-files -co --exclude-standard -z |
        tar -C "$project" --null -T - --ignore-failed-read -cf - 2> /dev/null | tar -C .gpu/project -xf -  # skips deleted files
    [ -e .gpu/project/pyproject.toml ] || die "the files of $project could not be copied to .gpu/project"
fi

# ---- size of the files ------------------------------------------------------------------------------------------------------
kib() { du -sk --apparent-size "$1" | cut -f1; }
tree_kib=$(git ls-files -co --exclude-standard -z | du -ck --apparent-size --files0-from=- 2> /dev/null | tail -1 | cut -f1)
gpu_kib=$(kib .gpu)
say "$have wheels ($(kib .gpu/wheels) KiB), commit $(cat .gpu/commit.txt)"
say "working tree $tree_kib KiB + .gpu $gpu_kib KiB = $(( (tree_kib + gpu_kib) / 1024 )) MiB of $limit_mib"
[ $((tree_kib + gpu_kib)) -lt $((limit_mib * 1024 - 1024)) ] || die "the files exceed $limit_mib MiB. Remove large files"
here=benchmarks/gpu; [ ! -d .gpu/project ] || here=.gpu/project/benchmarks/gpu
say "ready. Copy .gpu with the working tree. A call takes at most 600 s. The first call is bash $here/call.sh tests"
