#!/bin/bash
# A whole study with one command: prepare -> pretrain -> probe + finetune, each job waiting for what it reads.
#
#   cluster/study.sh configs/study/NAME.yaml [--dry-run] [-- sbatch options]        from the repository root
#   cluster/study.sh configs/study/NAME.yaml --local [--ranks N]                     the same without SLURM
#
# What such a file may say stands in cluster/studies/study_file.py.
set -euo pipefail
if [ ! -x .venv/bin/python ]; then
    echo "cluster/study.sh: no .venv/bin/python in $PWD; run it from the repository root, after make demo or sh install.sh" >&2
    exit 2
fi
exec .venv/bin/python -m cluster.study "$@"
