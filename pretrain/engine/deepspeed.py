"""The DeepSpeed engine. Only this file imports deepspeed.

Stages 1 to 3 keep low-precision weights, and fp32 master weights in the sharded optimizer. Stage 0
keeps fp32 weights and uses autocast. All stages add up the gradients of micro-batches in fp32.

A step is applied only if the loss and the gradients of all ranks are finite. A loss that is not
finite makes the gradients NaN. The reduction passes the NaN to every rank, so the gradient norm is
NaN on every rank. At stages 1 and 2 the update reads the norm on the device, and the host does not
wait (sharded_update.py). At stage 0 this file waits for the norm. In fp16, with offload and at
stage 3 DeepSpeed waits.

An exported state has complete tensors by name (sharded_state.py), so a checkpoint fits any stage
and any number of ranks.
"""

import datetime
import logging
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed.distributed_c10d as c10d
from torch import Tensor, nn
from torch.optim import Optimizer

from data_prep.errors import UserError
from pretrain.augment.augmentation import Prepared
from pretrain.config import EngineSettings
from pretrain.data.order import BatchPlan
from pretrain.engine.ema import WeightAverage
from pretrain.engine.sharded_state import ShardedState
from pretrain.engine.sharded_update import ShardedUpdate, updates_on_device
from pretrain.engine.step import (
    DTYPES,
    EngineState,
    StepResult,
    checkpoint_activations,
    compile_blocks,
    keep_freed_memory,
    loss_of,
    norm_of,
    span,
    working_in,
)
from pretrain.engine.zero_cost import bucket_elements
from pretrain.models.cost import num_parameters
from pretrain.models.layers.buffers import average_over_ranks, kept_buffers, restore_buffers
from pretrain.optim import set_lr
from pretrain.ranks.preemption import Interrupted
from pretrain.ranks.world import World

if not torch.cuda.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # otherwise DeepSpeed warns
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # DeepSpeed's autotuner imports mlflow
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import deepspeed
logging.getLogger("DeepSpeed").setLevel(logging.ERROR)  # the import resets an earlier level
DynamicLossScaler = deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler


def start_distributed(world: World, *, timeout_s: float) -> torch.device:
    """Join the process group and return this rank's device. Raise UserError if the rank has no GPU
    on a node with GPUs."""
    on_gpu, num_gpus = torch.cuda.is_available(), torch.cuda.device_count()
    gpu = world.gpu(num_gpus)
    if on_gpu and gpu is None:  # may be retried: another node may have the GPU
        problem = f"local rank {world.local_rank} has no GPU ({num_gpus} visible)"
        raise UserError("--ranks", problem, "start one rank per GPU", code="missing-device")
    device = torch.device("cpu") if gpu is None else torch.device("cuda", gpu)
    if on_gpu:
        torch.cuda.set_device(device)
    else:
        keep_freed_memory()
        # DeepSpeed asks oneDNN, but torch needs no oneDNN for fp16
        deepspeed.accelerator.get_accelerator().is_fp16_supported = lambda: True
    timeout = datetime.timedelta(seconds=timeout_s)
    # otherwise DeepSpeed compiles a shared-memory op: 35 s, or a hang at a stale lock file
    deepspeed.ops.__compatible_ops__ = {"deepspeed_shm_comm": False}
    deepspeed.init_distributed("nccl" if on_gpu else "gloo", timeout=timeout, verbose=False)
    c10d.default_pg_nccl_timeout = timeout  # type: ignore[attr-defined]
    c10d.default_pg_timeout = timeout  # DeepSpeed's own groups would wait 30 minutes
    return device


LOSS_SCALE = {"init_scale": 2**16, "scale_window": 1000, "min_scale": 1, "delayed_shift": 2}
"""Settings of fp16's dynamic loss scale: first scale, finite steps before it doubles, lowest scale,
overflows before it is halved."""
SCALE_STATE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
"""Attributes of a `DynamicLossScaler` that a checkpoint stores."""


class DeepSpeedEngine:
    def __init__(
        self,
        model: nn.Module,
        *,
        make_optimizer: Callable[[nn.Module], Optimizer],
        settings: EngineSettings,
        plan: BatchPlan,
        label_smoothing: float,
        device: torch.device,
        world: World,
        ema_decay: float | None = None,
    ):
        stage, on_gpu = settings.zero_stage, device.type == "cuda"
        self.device, self.settings, self.plan, self.world = device, settings, plan, world
        self.label_smoothing, self._dtype = label_smoothing, DTYPES[settings.precision]
        self._weight_dtype = self._dtype if stage > 0 else torch.float32
        self.input_dtype = self._weight_dtype
        if settings.precision == "fp16" and not on_gpu:  # the CPU's augmentation has no fp16
            self.input_dtype = torch.float32
        model = model.to(device)
        if settings.activation_checkpointing:
            checkpoint_activations(model)
        if stage == 0 and self._dtype != torch.float32:
            _autocast(model, device=device, dtype=self._dtype)
        config = deepspeed_config(settings, plan, model, on_gpu=on_gpu)
        self._engine, self._optimizer, _, _ = deepspeed.initialize(
            model=model, optimizer=make_optimizer(model), config=config
        )
        if stage == 1 and settings.precision == "bf16" and plan.accumulation_steps > 1:
            # DeepSpeed reads these in the first backward pass; other stages use `grad_accum_dtype`
            self._optimizer.gradient_accumulation_dtype = torch.float32
            self._optimizer.use_separate_grad_accum = True
            self._optimizer.use_grad_accum_attribute = True
        self._state = ShardedState(
            self._engine.module, self._optimizer, stage=stage, world=world, device=device
        )
        self._update: ShardedUpdate | None = None
        if updates_on_device(settings):
            self._update = ShardedUpdate(
                self._optimizer, clip_norm=settings.gradient_clip_norm, world=world
            )
            # one rank has nothing to reduce, but DeepSpeed would copy each gradient three times
            self._engine.enable_backward_allreduce = world.num_ranks > 1 or stage > 1
            if self._optimizer.overlap_comm:
                _end_reduction_on_device(self._optimizer)
        self._num_updates: int | Tensor = 0
        self._scaler = self._loss_scaler() if settings.precision == "fp16" else None
        self._average: WeightAverage | None = None
        if ema_decay is not None:
            self._average = WeightAverage(self._state.weights(), decay=ema_decay)
        if settings.compile:
            compile_blocks(self._engine.module)

    def _loss_scaler(self) -> Any:
        """Return DeepSpeed's loss scaler, or a new one at stage 0, where DeepSpeed has none."""
        if self.settings.zero_stage == 0:
            return DynamicLossScaler(
                consecutive_hysteresis=False, raise_error_at_min_scale=False, **LOSS_SCALE
            )
        scaler = self._optimizer.loss_scaler
        scaler.raise_error_at_min_scale = False  # the trainer counts skipped steps

        def only_fall(overflow: bool) -> None:
            """Lower the loss scale, but never raise it. DeepSpeed calls this function within a
            step, and then divides the gradients by the new scale. `_update_sharded` raises the
            scale after the step."""
            if overflow:
                DynamicLossScaler.update_scale(scaler, True)

        scaler.update_scale = only_fall
        return scaler

    # ---- training

    def train_step(self, micro_batches: Sequence[Prepared], *, lr: float) -> StepResult:
        assert len(micro_batches) == self.plan.accumulation_steps, len(micro_batches)
        self._engine.train()
        set_lr(self._optimizer, lr)
        total = torch.zeros((), device=self.device)
        for number, batch in enumerate(micro_batches, start=1):
            with working_in(self.settings.precision), span("forward and backward"):
                logits = self._engine(batch.images_BCHW.to(self._weight_dtype))
                assert logits.dtype == self._dtype, logits.dtype
                loss = loss_of(logits, batch, label_smoothing=self.label_smoothing)
                total += loss.detach() / len(micro_batches)
                # a NaN gradient makes the norm NaN on all ranks
                loss = loss * torch.where(loss.detach().isfinite(), 1.0, torch.nan)
                if self._scaler is not None and self.settings.zero_stage == 0:
                    loss = loss * self._scaler.loss_scale
                self._engine.backward(loss)
            if number < len(micro_batches):
                self._engine.step()  # DeepSpeed counts the micro-batch
        is_plain = self.settings.zero_stage == 0
        with span("update"):
            norm, applied = self._update_plain() if is_plain else self._update_sharded()
            self._num_updates = self._num_updates + applied
            if self._average is not None:
                self._average.update(applied)
        return StepResult(loss=total, gradient_norm=norm, applied=applied)

    def _update_sharded(self) -> tuple[Tensor | float, Tensor | bool]:
        if self._update is not None:
            self._update.step()
            self._optimizer.zero_grad()
            self._engine.micro_steps += 1
            return self._update.norm, self._update.norm.isfinite()
        self._engine.step()
        applied = not self._optimizer.overflow
        if not applied:
            self._state.forget_gradients()
        elif self._scaler is not None:
            DynamicLossScaler.update_scale(self._scaler, False)
        return self._engine.get_global_grad_norm(), applied

    def _update_plain(self) -> tuple[Tensor, bool]:
        """Unscale, clip and apply the gradients at stage 0. Return the norm and True if it is
        finite."""
        parameters = [each for each in self._engine.module.parameters() if each.grad is not None]
        gradients = [each.grad for each in parameters]
        scale = self._scaler.loss_scale if self._scaler is not None else 1.0
        norm = norm_of(gradients) / scale
        applied = bool(norm.isfinite())  # only this line waits; all ranks have the same norm
        if self._scaler is not None:
            self._scaler.update_scale(not applied)
        if not applied:
            self._engine.zero_grad()
            self._engine.micro_steps += 1
            return norm, False
        if scale != 1:
            torch._foreach_mul_(gradients, 1 / scale)
        if self.settings.gradient_clip_norm > 0:
            nn.utils.clip_grads_with_norm_(parameters, self.settings.gradient_clip_norm, norm)
        self._engine.step()
        return norm, True

    # ---- evaluation

    def logits(self, images: Tensor) -> Tensor:
        if self._engine.module.training:
            average_over_ranks(self._engine.module)
        self._engine.eval()
        with torch.no_grad(), working_in(self.settings.precision):
            logits: Tensor = self._engine(images.to(self._weight_dtype))
        return logits.float()

    def weight(self, name: str) -> Tensor | None:
        parameter = self._engine.module.get_parameter(name)
        if self.settings.zero_stage == 3:
            parameter = deepspeed.utils.safe_get_full_fp32_param(parameter)
        return parameter.detach() if self.world.is_first else None

    @contextmanager
    def averaged(self) -> Iterator[None]:
        if self._average is None:
            yield
            return
        try:
            with self._average.swapped():
                self._state.refresh_working_weights()
                yield
        except Interrupted:
            self._state.refresh_working_weights()
            raise
        # not in a `finally`: after an error on one rank, other ranks would not join the gather
        self._state.refresh_working_weights()

    # ---- state

    def export_state(self) -> EngineState:
        average_over_ranks(self._engine.module)
        wanted = {"weight": self._state.weights()} | {
            kind: self._state.of_kind(kind) for kind in self._state.kinds()
        }
        if self._average is not None:
            wanted["average"] = self._average.shards
        found = self._state.read(wanted)
        if not self.world.is_first:
            return EngineState()
        weights = found.pop("average" if self._average is not None else "weight")
        optimizer = {
            f"{kind}.{name}": value
            for kind, values in found.items()
            for name, value in values.items()
        }
        scale = (
            {name: float(getattr(self._scaler, name)) for name in SCALE_STATE}
            if self._scaler is not None
            else {}
        )
        return EngineState(
            weights | kept_buffers(self._engine.module), optimizer, int(self._num_updates), scale
        )

    def import_state(self, state: EngineState) -> None:
        by_kind: dict[str, dict[str, Tensor]] = {}
        for key, value in state.optimizer.items():
            kind, _, name = key.partition(".")
            by_kind.setdefault(kind, {})[name] = value
        raw = by_kind.pop("weight", state.weights)
        self._num_updates = state.num_updates
        self._state.create(sorted(by_kind), num_updates=state.num_updates)
        self._state.write(self._state.weights(), raw)
        for kind, tensors in by_kind.items():
            self._state.write(self._state.of_kind(kind), tensors)
        if self._average is not None:
            self._state.write(self._average.shards, state.weights)
        if self._scaler is not None:
            for field, number in state.scale.items():
                setattr(self._scaler, field, number if field == "cur_scale" else int(number))
        restore_buffers(self._engine.module, state.weights)
        self._state.refresh_working_weights()


def _autocast(model: Any, *, device: torch.device, dtype: torch.dtype) -> None:
    """Run the model's `forward` in autocast. DeepSpeed disables an autocast outside the model, and
    DeepSpeed's own autocast would apply to the complete process."""
    plain = model.forward

    def forward(images_BCHW: Tensor) -> Tensor:
        with torch.autocast(device.type, dtype=dtype):
            return plain(images_BCHW)  # type: ignore[no-any-return]

    model.forward = forward


def _end_reduction_on_device(zero: Any) -> None:
    """After each backward pass, let the update's stream, not the host, wait for reductions."""
    accelerator = deepspeed.accelerator.get_accelerator()
    end = zero.independent_gradient_partition_epilogue

    def ended() -> None:
        accelerator.synchronize = lambda *_: accelerator.current_stream().wait_stream(
            zero.reduction_stream
        )
        try:
            end()
        finally:
            del accelerator.synchronize

    zero.independent_gradient_partition_epilogue = ended


def deepspeed_config(
    settings: EngineSettings, plan: BatchPlan, model: nn.Module, *, on_gpu: bool
) -> dict[str, Any]:
    stage, cpu = settings.zero_stage, {"device": "cpu", "pin_memory": on_gpu}
    bucket = bucket_elements(num_parameters(model))
    zero: dict[str, Any] = {
        "stage": stage,
        "reduce_bucket_size": bucket,
        "allgather_bucket_size": bucket,
        # otherwise stage 3 would gather all weights of a model below a billion
        "stage3_prefetch_bucket_size": bucket // 8,
        "stage3_max_reuse_distance": bucket // 8,
        "stage3_max_live_parameters": bucket // 2,
    }
    if updates_on_device(settings):
        if stage == 1 and plan.num_ranks == 1:
            zero["reduce_bucket_size"] = 8  # the bucket stays empty
        # DeepSpeed's reduce-scatter is an all-reduce with two more copies
        zero["reduce_scatter"] = False
        # DeepSpeed would free the gradient of a weight above the bucket size before it is reduced
        largest = max(each.numel() for each in model.parameters())
        zero["overlap_comm"] = on_gpu and plan.num_ranks > 1 and largest <= bucket
    if settings.offload != "none":
        zero["offload_optimizer"] = cpu
    if settings.offload == "all":
        zero["offload_param"] = cpu
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": plan.local_batch_size,
        "gradient_accumulation_steps": plan.accumulation_steps,
        # always set, because the default is 1.0; at stage 0 `_update_plain` clips
        "gradient_clipping": settings.gradient_clip_norm if stage else 0.0,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": None,
        "timers": {"throughput": {"enabled": False}},  # this timer waits for the device
    }
    if stage and DTYPES[settings.precision] != torch.float32:
        config[settings.precision] = {"enabled": True}
        if settings.precision == "fp16":
            config["fp16"] |= {
                "loss_scale": 0,  # dynamic
                "initial_scale_power": LOSS_SCALE["init_scale"].bit_length() - 1,
                "loss_scale_window": LOSS_SCALE["scale_window"],
                "min_loss_scale": LOSS_SCALE["min_scale"],
                "hysteresis": LOSS_SCALE["delayed_shift"],
            }
        # in bf16 at stage 1 DeepSpeed would choose the BF16_Optimizer, whose state differs
        if stage > 1 or settings.precision == "fp16" or settings.offload != "none":
            config["data_types"] = {"grad_accum_dtype": "fp32"}
    return config
