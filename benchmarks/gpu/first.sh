#!/usr/bin/env bash
# The first call on a GPU: does everything run there at all? About 50 checks, six at a time, a line each; goes on after failures.
#
#   bash benchmarks/gpu/first.sh                      all of it: about six minutes
#   NAMES="z1-* probe* data*" bash benchmarks/gpu/first.sh     some of it (globs); `data` and what a check builds upon must be among them
#
# Every `train` runs the same 24 steps of the demo's MLP: the last table holds their losses against a run on the CPU. A dry run
# has fewer and smaller ones: STEPS, BATCH, MIXER_BATCH.
set -u
JOBS=${JOBS:-6} STEPS=${STEPS:-24} BATCH=${BATCH:-512} MIXER_BATCH=${MIXER_BATCH:-256}
LENGTH=("train.duration=$STEPS steps" "schedule.warmup=$((STEPS / 2)) steps" "train.eval_every=$STEPS steps" "checkpoint.every=$STEPS steps"
    tracking.enabled=false)
# shellcheck source=benchmarks/gpu/lib.sh
. "$(dirname "$0")/lib.sh"
setup

steps() { # NAME then settings: the demo's MLP
    local name=$1; shift
    try "$name" 150 "$PYTHON" -m pretrain train configs/pretrain/demo_mlp.yaml "run_dir=runs/gpu/$name" data.dataset=data/demo-pretrain \
        "train.global_batch_size=$BATCH" "${LENGTH[@]}" "$@"
}
mixer() { # NAME then settings: the demo's mixer
    local name=$1; shift
    try "$name" 200 "$PYTHON" -m pretrain train configs/pretrain/demo_mixer.yaml "run_dir=runs/gpu/$name" data.dataset=data/demo-pretrain \
        "train.global_batch_size=$MIXER_BATCH" "${LENGTH[@]}" "$@"
}
recipe='augment={crop_scale: [0.08, 1.0], crop_interpolation: random, auto_augment: rand-m9-mstd0.5-inc1, erase_probability: 0.25,
    mixup_alpha: 0.8, cutmix_alpha: 1.0, switch_probability: 0.5}'

try imports 120 "$PYTHON" -c "
import importlib, torch
for name in ('pydantic', 'deepspeed', 'accelerate', 'timm', 'mlflow', 'numba', 'simplejpeg', 'pandas', 'pyarrow', 'safetensors', 'onnx',
             'onnxruntime', 'webdataset', 'cv2', 'pretrain.engine.deepspeed', 'pretrain.augment.on_cpu', 'finetune.tune.tune'):
    try:
        print(name, getattr(importlib.import_module(name), '__version__', ''))
    except Exception as error:
        print('MISSING', name, type(error).__name__, error); missing = True
assert 'missing' not in dir(), 'see above'
print('all imports; GPUs:', torch.cuda.device_count())"
try data-pretrain 150 "$PYTHON" -m data_prep build configs/data_prep/demo_pretrain.yaml
try data-transfer 150 "$PYTHON" -m data_prep build configs/data_prep/demo_transfer.yaml
settle

try check-cuda 330 "$PYTHON" "$KIT/check_cuda.py"
try cpu-fp32 150 env CUDA_VISIBLE_DEVICES= "$PYTHON" -m pretrain train configs/pretrain/demo_mlp.yaml run_dir=runs/gpu/cpu-fp32 \
    data.dataset=data/demo-pretrain "train.global_batch_size=$BATCH" "${LENGTH[@]}" engine.zero_stage=1
steps z1-bf16 engine.zero_stage=1 engine.precision=bf16
for stage in 0 1 2 3; do
    steps z$stage-fp32 engine.zero_stage=$stage engine.precision=fp32
    [ $stage = 1 ] || steps z$stage-bf16 engine.zero_stage=$stage engine.precision=bf16
done
# the same bits after SIGTERM and another start
for stage in 0 1 2 3; do
    try resume-z$stage 200 "$PYTHON" "$KIT/resume.py" engine.zero_stage=$stage engine.precision=bf16
done
for stage in 0 1 2; do
    steps compile-z$stage engine.zero_stage=$stage engine.precision=bf16 engine.compile=true
done
steps z1-tf32 engine.zero_stage=1 engine.precision=tf32
steps cuda-graphs engine.zero_stage=0 engine.precision=bf16 engine.compile=true engine.cuda_graphs=true
for stage in 0 1 2 3; do
    steps z$stage-fp16 engine.zero_stage=$stage engine.precision=fp16
    steps z$stage-accumulate engine.zero_stage=$stage engine.precision=bf16 "train.local_batch_size=$((BATCH / 4))"
done
steps z2-offload engine.zero_stage=2 engine.precision=bf16 engine.offload=optimizer
steps z3-offload engine.zero_stage=3 engine.precision=bf16 engine.offload=all
steps auto engine.zero_stage=1 engine.precision=bf16 train.local_batch_size=auto
steps recompute engine.zero_stage=1 engine.precision=bf16 engine.activation_checkpointing=true
steps adamw-ema engine.zero_stage=1 engine.precision=bf16 optimizer.name=adamw train.ema_decay=0.9
steps sgd engine.zero_stage=1 engine.precision=bf16 optimizer.name=sgd optimizer.lr=0.01
mixer recipe engine.zero_stage=1 engine.precision=bf16 "$recipe"
mixer recipe-compiled engine.zero_stage=1 engine.precision=bf16 engine.compile=true "$recipe"
mixer rp-mixer engine.zero_stage=1 engine.precision=bf16 'model={preset: rp_mixer_ss_w, num_channels: 67}'
mixer smixer engine.zero_stage=0 engine.precision=bf16 'model={preset: smixer_c32}'
mixer sw-mlp-masked engine.zero_stage=1 engine.precision=bf16 'model={preset: sw_mlp_540}'
mixer sw-mlp-sparse engine.zero_stage=1 engine.precision=bf16 'model={kind: sw_mlp, width: 1619, density: 0.02}'
mixer monarch engine.zero_stage=1 engine.precision=bf16 'model={preset: monarch_mnist, greyscale: false}'
try tracked 150 "$PYTHON" -m pretrain train configs/pretrain/demo_mlp.yaml run_dir=runs/gpu/tracked data.dataset=data/demo-pretrain \
    "train.global_batch_size=$BATCH" "train.duration=${TRACKED_STEPS:-3000} steps" "train.eval_every=1000 steps" engine.zero_stage=1 engine.precision=bf16
try torchrun 150 "$PYTHON" -m torch.distributed.run --nproc-per-node 1 -m pretrain train configs/pretrain/demo_mlp.yaml \
    run_dir=runs/gpu/torchrun data.dataset=data/demo-pretrain "train.global_batch_size=$BATCH" "${LENGTH[@]}"
# a dry run has no GPU that a second rank could lack
[ -n "${SMALL:-}" ] || try two-ranks-refused 90 bash -c "! $PYTHON -m pretrain train configs/pretrain/demo_mlp.yaml --ranks 2 run_dir=runs/gpu/two \
    data.dataset=data/demo-pretrain 'train.duration=24 steps' tracking.enabled=false > two.log 2>&1; tail -3 two.log; grep -q 'has no GPU' two.log"
try preflight 120 "$PYTHON" -m cluster.preflight runs/gpu/preflight
settle

tune() { # NAME then settings
    local name=$1; shift
    try "$name" 150 "$PYTHON" -m finetune tune configs/finetune/demo.yaml pretrained=runs/gpu/z1-bf16 "run_dir=runs/gpu/$name" \
        "${LENGTH[@]}" "$@"
}
try probe 120 "$PYTHON" -m finetune probe configs/probe/demo.yaml pretrained=runs/gpu/z1-bf16 run_dir=runs/gpu/probe tracking.enabled=false
for optimizer in sgd adamw lbfgs; do
    try probe-$optimizer 150 "$PYTHON" -m finetune probe configs/probe/demo.yaml pretrained=runs/gpu/z1-bf16 run_dir=runs/gpu/probe-$optimizer \
        optimizer=$optimizer lrs=null tracking.enabled=false
done
try probe-views 150 "$PYTHON" -m finetune probe configs/probe/demo.yaml pretrained=runs/gpu/z1-bf16 run_dir=runs/gpu/probe-views optimizer=lion views=4 \
    "augment={crop_scale: [0.4, 1.0]}" feature_dtype=float16 tracking.enabled=false
try knn 120 "$PYTHON" -m finetune knn configs/knn/demo.yaml pretrained=runs/gpu/z1-bf16 dataset=data/demo-transfer run_dir=runs/gpu/knn tracking.enabled=false
tune tune-fp32
tune tune-bf16 engine.precision=bf16
tune tune-compiled engine.precision=bf16 engine.compile=true
tune tune-auto engine.precision=bf16 train.local_batch_size=auto
try accelerate 150 "$PYTHON" -m accelerate.commands.launch --num_processes 1 -m finetune tune configs/finetune/demo.yaml \
    pretrained=runs/gpu/z1-bf16 run_dir=runs/gpu/accelerate "${LENGTH[@]}"
try evaluate 120 "$PYTHON" -m finetune evaluate pretrained=runs/gpu/z1-bf16 dataset=data/demo-pretrain run_dir=runs/gpu/evaluate tracking.enabled=false
try evaluate-views 120 "$PYTHON" -m finetune evaluate pretrained=runs/gpu/z1-bf16 dataset=data/demo-pretrain run_dir=runs/gpu/evaluate-views views=10 precision=bf16 \
    tracking.enabled=false
try preview 90 "$PYTHON" -m pretrain preview configs/pretrain/demo_mlp.yaml data.dataset=data/demo-pretrain --out runs/gpu/preview.png
settle
try export 120 "$PYTHON" -m finetune export runs/gpu/z1-bf16 runs/gpu/exported
[ -n "${SMALL:-}" ] || try gpu-in-books 60 "$PYTHON" "$KIT/losses.py" runs/gpu --books runs/gpu/tracked
settle
[ -n "${LIST:-}" ] || "$PYTHON" "$KIT/losses.py" runs/gpu 2>&1 | tee "$OUT/losses.txt"
summary
