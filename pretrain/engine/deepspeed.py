"""DeepSpeed behind the `Engine` contract. The only file that imports deepspeed.

bf16 and fp16 at stages 1-3 mean low-precision weights with fp32 master copies in the sharded
optimizer; at stage 0, where DeepSpeed has neither sharding nor readable state for them, they are
autocast over fp32 weights. The gradients of micro-batches are added up in fp32 at every stage.

A step counts only if the loss and the gradients of all ranks are finite: a loss that is not makes
its gradients NaN, the reduction carries that to every rank, and the norm, which each step has
anyhow, shows it everywhere at once. At stages 1 and 2 the update looks at the norm where it is, on
the device, and no step waits (sharded_update.py). At stage 0 this file waits for the norm before it
updates; in fp16, with offload and at stage 3 DeepSpeed does, twice.

State leaves and enters whole (see sharded_state.py), so a checkpoint fits any number of ranks and
any stage.

Long because everything that touches DeepSpeed is in this file.
"""

import datetime
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
import torch.distributed.distributed_c10d as c10d
from torch import Tensor, nn
from torch.optim import Optimizer

from data_prep.errors import SettingsError, UserError
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
    working_in,
)
from pretrain.engine.zero_cost import bucket_elements
from pretrain.models.cost import num_parameters
from pretrain.models.layers.buffers import average_over_ranks, kept_buffers, restore_buffers
from pretrain.optim import set_lr
from pretrain.ranks.preemption import Interrupted
from pretrain.ranks.world import World


def _import_deepspeed() -> Any:
    """deepspeed without mlflow (its autotuner imports it if it can, which costs four seconds),
    without Muon (whose module loads torch's compiler, and which no config of ours can name), and
    without its greetings."""
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # or it warns that it found nothing better
    hidden = sys.modules.get("mlflow")
    sys.modules["mlflow"] = None  # type: ignore[assignment]
    for name, only in (("muon_optimizer", "MuonWithAuxAdam"), ("original_muon", "muon_update")):
        module = ModuleType(f"deepspeed.runtime.zero.muon.{name}")
        setattr(module, only, type(only, (), {}))  # of which no optimizer is an instance
        sys.modules.setdefault(module.__name__, module)
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), _no_compiler():
            warnings.simplefilter("ignore")
            import deepspeed
        logging.getLogger("DeepSpeed").setLevel(logging.ERROR)  # once more: the import sets it
    finally:
        if hidden is None:
            del sys.modules["mlflow"]
        else:
            sys.modules["mlflow"] = hidden
    return deepspeed


@contextmanager
def _no_compiler() -> Iterator[None]:
    """What is marked here as "not to be compiled" stays as it is. torch's own mark loads its
    compiler when the function is first called, which took a third of a rank's start, and nothing is
    compiled but blocks of the model (`engine.compile`) and the loss on GPUs, in which no such
    function is."""

    def unchanged(function: Any = None, **_: Any) -> Any:
        return function if function is not None else unchanged

    places: list[tuple[Any, str]] = [(torch, "_disable_dynamo"), (torch.compiler, "disable")]
    marks = [getattr(module, name) for module, name in places]
    try:
        for module, name in places:
            setattr(module, name, unchanged)
        yield
    finally:
        for (module, name), mark in zip(places, marks, strict=True):
            setattr(module, name, mark)


for _method in (
    Optimizer.add_param_group,
    Optimizer.zero_grad,
    Optimizer.state_dict,
    Optimizer.load_state_dict,
):
    _plain: Any = getattr(_method, "__wrapped__", _method)
    # what torch's mark would make when the method is first called, and keep under this name
    _plain.__dynamo_disable = _plain
deepspeed = _import_deepspeed()
DynamicLossScaler = deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler


def start_distributed(world: World, *, timeout_s: float) -> torch.device:
    """Join the ranks and return this rank's device. A missing GPU is no SettingsError: on another
    node it may be there."""
    on_gpu, num_gpus = torch.cuda.is_available(), torch.cuda.device_count()
    gpu = world.gpu(num_gpus)
    if on_gpu and gpu is None:
        raise UserError(
            f"--ranks: local rank {world.local_rank} has no GPU, {num_gpus} are visible; start one"
            " rank per GPU"
        )
    device = torch.device("cpu") if gpu is None else torch.device("cuda", gpu)
    if on_gpu:
        torch.cuda.set_device(device)
    else:
        keep_freed_memory()
        # DeepSpeed asks oneDNN and refuses; torch computes fp16 without it, if slowly
        deepspeed.accelerator.get_accelerator().is_fp16_supported = lambda: True
    timeout = datetime.timedelta(seconds=timeout_s)
    # Else the shared-memory op is compiled on first use (35 s, and a stale lock file hangs it),
    # though gloo needs no help, and the C compiler is asked about each op; this is the only one
    # that DeepSpeed looks up.
    deepspeed.ops.__compatible_ops__ = {"deepspeed_shm_comm": False}
    deepspeed.init_distributed("nccl" if on_gpu else "gloo", timeout=timeout, verbose=False)
    c10d.default_pg_nccl_timeout = timeout  # type: ignore[attr-defined]
    c10d.default_pg_timeout = (
        timeout  # DeepSpeed's own groups are made without one, and would wait 30 minutes
    )
    return device


LOSS_SCALE = {"init_scale": 2**16, "scale_window": 1000, "min_scale": 1, "delayed_shift": 2}
"""fp16: where the scale starts, after how many good steps it doubles, its floor, and which overflow
in a row halves it."""
SCALE_STATE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
"""All that changes in a `DynamicLossScaler`."""


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
        self.device, self.settings, self.plan, self.world, self.label_smoothing = (
            device,
            settings,
            plan,
            world,
            label_smoothing,
        )
        self._dtype = DTYPES[settings.precision]
        self._weight_dtype = self._dtype if settings.zero_stage > 0 else torch.float32
        makes_fp16 = device.type == "cuda"  # the CPU's augmentation does not
        self.input_dtype = (
            torch.float32 if settings.precision == "fp16" and not makes_fp16 else self._weight_dtype
        )
        model = model.to(device)
        if settings.activation_checkpointing:
            checkpoint_activations(model)
        if settings.zero_stage == 0 and self._dtype != torch.float32:
            _autocast(model, device=device, dtype=self._dtype)
        config = deepspeed_config(settings, plan, model, on_gpu=device.type == "cuda")
        with _no_compiler():
            self._engine, self._optimizer, _, _ = deepspeed.initialize(
                model=model, optimizer=make_optimizer(model), config=config
            )
        if (
            settings.zero_stage == 1
            and settings.precision == "bf16"
            and plan.accumulation_steps > 1
        ):
            _accumulate_in_fp32(self._optimizer)
        self._state = ShardedState(
            self._engine.module,
            self._optimizer,
            stage=settings.zero_stage,
            world=world,
            device=device,
        )
        self._update: ShardedUpdate | None = None
        if updates_on_device(settings):
            self._update = ShardedUpdate(
                self._optimizer, clip_norm=settings.gradient_clip_norm, world=world
            )
            self._optimizer.step = self._update.step
            # alone there is nothing to reduce: DeepSpeed would copy each gradient three times
            self._engine.enable_backward_allreduce = world.num_ranks > 1 or settings.zero_stage > 1
            if self._optimizer.overlap_comm:
                _end_reduction_on_device(self._optimizer)
        self._num_updates: int | Tensor = 0
        self._scaler = self._loss_scaler() if settings.precision == "fp16" else None
        self._average = (
            WeightAverage(self._state.weights(), decay=ema_decay) if ema_decay is not None else None
        )
        if hasattr(self._state.plain, "bind"):
            self._state.plain.bind(self._state.my_segments())
        if settings.compile:
            self._compile()

    def _compile(self) -> None:
        if not self.settings.cuda_graphs:
            compile_blocks(self._engine.module)
            return
        if (
            self.plan.accumulation_steps > 1
        ):  # a replay writes gradients where those of the last one lie
            fault = f"true will not do with {self.plan.accumulation_steps} micro-batches a step"
            raise SettingsError(
                f"engine.cuda_graphs: {fault}; leave train.local_batch_size out, or set"
                " cuda_graphs=false"
            )
        self._engine.module.compile(mode="reduce-overhead", dynamic=False)

    def _loss_scaler(self) -> Any:
        """DeepSpeed's, at every stage: at stage 0, where it has none that could be saved, one of
        our own."""
        if self.settings.zero_stage == 0:
            return DynamicLossScaler(
                consecutive_hysteresis=False, raise_error_at_min_scale=False, **LOSS_SCALE
            )
        scaler = self._optimizer.loss_scaler
        scaler.raise_error_at_min_scale = (
            False  # how many steps may be skipped is the trainer's to say
        )

        def only_fall(overflow: bool) -> None:
            """0.19.8 calls it in the middle of a step, and then divides the gradients by the new
            scale: `_update_sharded` counts good steps, after which the scale may grow, when the
            step is over."""
            if overflow:
                DynamicLossScaler.update_scale(scaler, True)

        scaler.update_scale = only_fall
        return scaler

    # ---- training
    # ----------------------------------------------------------------------------------------------

    def train_step(self, micro_batches: Sequence[Prepared], *, lr: float) -> StepResult:
        assert len(micro_batches) == self.plan.accumulation_steps, len(micro_batches)
        self._engine.train()
        set_lr(self._optimizer, lr)
        total = torch.zeros((), device=self.device)
        for number, batch in enumerate(micro_batches, start=1):
            with working_in(self.settings.precision):
                logits = self._engine(batch.images_BCHW.to(self._weight_dtype))
                assert logits.dtype == self._dtype, logits.dtype
                loss = loss_of(logits, batch, label_smoothing=self.label_smoothing)
                total += loss.detach() / len(micro_batches)
                loss = loss * torch.where(
                    loss.detach().isfinite(), 1.0, torch.nan
                )  # seen by all ranks in the norm
                if self._scaler is not None and self.settings.zero_stage == 0:
                    loss = loss * self._scaler.loss_scale
                self._engine.backward(loss)
            if number < len(micro_batches):
                self._engine.step()  # DeepSpeed counts the micro-batch
        norm, applied = (
            self._update_plain() if self.settings.zero_stage == 0 else self._update_sharded()
        )
        self._num_updates = self._num_updates + applied
        if self._average is not None:
            self._average.update(applied)
        return StepResult(loss=total, gradient_norm=norm, applied=applied)

    def _update_sharded(self) -> tuple[Tensor | float, Tensor | bool]:
        self._engine.step()
        if self._update is not None:
            return self._update.norm, self._update.norm.isfinite()
        applied = not self._optimizer.overflow
        if not applied:
            self._state.forget_gradients()
        elif self._scaler is not None:
            DynamicLossScaler.update_scale(self._scaler, False)
        return self._engine.get_global_grad_norm(), applied

    def _update_plain(self) -> tuple[Tensor, bool]:
        """Stage 0: what the sharded optimizers do, with one pass over the gradients for the norm
        that is logged and clipped to."""
        parameters = [each for each in self._engine.module.parameters() if each.grad is not None]
        gradients = [each.grad for each in parameters]
        scale = self._scaler.loss_scale if self._scaler is not None else 1.0
        norm = norm_of(gradients) / scale
        applied = bool(norm.isfinite())  # the one wait; after the reduction all ranks see the same
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
    # ----------------------------------------------------------------------------------------------

    def logits(self, images: Tensor) -> Tensor:
        if self._engine.module.training:
            average_over_ranks(self._engine.module)
        self._engine.eval()
        with torch.no_grad(), working_in(self.settings.precision):
            logits: Tensor = self._engine(images.to(self._weight_dtype))
        return logits.float()

    def weight(self, name: str) -> Tensor | None:
        parameter = self._engine.module.get_parameter(name)
        if self.settings.zero_stage == 3:  # in shards, that all ranks put together
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
        # no `finally`: of any other error this rank may have been alone, and the others would not
        # take part
        self._state.refresh_working_weights()

    # ---- state
    # ----------------------------------------------------------------------------------------------

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
    """Around the model's own forward: DeepSpeed switches off an autocast outside, and its own marks
    the whole process."""
    plain = model.forward

    def forward(images_BCHW: Tensor) -> Tensor:
        with torch.autocast(device.type, dtype=dtype):
            return plain(images_BCHW)  # type: ignore[no-any-return]

    model.forward = forward


def _accumulate_in_fp32(zero: Any) -> None:
    """Set what `data_types.grad_accum_dtype` sets at other stages. It is read when the first
    backward pass begins."""
    zero.gradient_accumulation_dtype = torch.float32
    zero.use_separate_grad_accum = zero.use_grad_accum_attribute = True


def _end_reduction_on_device(zero: Any) -> None:
    """With overlap the host would wait for the device after each backward pass; that the update's
    stream waits is enough."""
    accelerator, end = (
        deepspeed.accelerator.get_accelerator(),
        zero.independent_gradient_partition_epilogue,
    )

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
    """Our settings in DeepSpeed's words."""
    stage, cpu = settings.zero_stage, {"device": "cpu", "pin_memory": on_gpu}
    bucket = bucket_elements(num_parameters(model))
    zero: dict[str, Any] = {
        "stage": stage,
        "reduce_bucket_size": bucket,
        "allgather_bucket_size": bucket,
    }
    # or stage 3 would hold the whole of any model below a billion weights from forward to backward
    zero |= {"stage3_prefetch_bucket_size": bucket // 8, "stage3_max_reuse_distance": bucket // 8}
    zero |= {"stage3_max_live_parameters": bucket // 2}
    if updates_on_device(settings):
        if stage == 1 and plan.num_ranks == 1:
            zero["reduce_bucket_size"] = 8  # nothing will lie in it
        # DeepSpeed would send as much, as an all-reduce of its buckets, and copy them twice more
        zero["reduce_scatter"] = False
        # a larger weight would be reduced where its gradient lies, which is freed before the other
        # stream is done
        largest = max(each.numel() for each in model.parameters())
        zero["overlap_comm"] = on_gpu and plan.num_ranks > 1 and largest <= bucket
    if settings.offload != "none":
        zero["offload_optimizer"] = cpu
    if settings.offload == "all":
        zero["offload_param"] = cpu
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": plan.local_batch_size,
        "gradient_accumulation_steps": plan.accumulation_steps,
        # always said: the default is 1.0 since 0.19.3. At stage 0 `_update_plain` clips.
        "gradient_clipping": settings.gradient_clip_norm if stage else 0.0,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": None,
        "timers": {
            "throughput": {"enabled": False}
        },  # or it waits for the device twice in each micro-batch
    }
    if stage and DTYPES[settings.precision] != torch.float32:
        config[settings.precision] = {"enabled": True}
        if settings.precision == "fp16":
            config["fp16"] |= {
                "loss_scale": 0,
                "initial_scale_power": LOSS_SCALE["init_scale"].bit_length() - 1,
            }  # 0: dynamic
            config["fp16"] |= {
                "loss_scale_window": LOSS_SCALE["scale_window"],
                "min_loss_scale": LOSS_SCALE["min_scale"],
            }
            config["fp16"] |= {"hysteresis": LOSS_SCALE["delayed_shift"]}
        # in bf16 at stage 1 it would choose DeepSpeed's BF16_Optimizer, another class with another
        # state: see _accumulate_in_fp32
        if stage > 1 or settings.precision == "fp16" or settings.offload != "none":
            config["data_types"] = {"grad_accum_dtype": "fp32"}
    return config
