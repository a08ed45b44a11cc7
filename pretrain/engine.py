"""DeepSpeed behind the `Engine` contract. The only file that imports deepspeed.

bf16 at stages 1-3 means bf16 weights with fp32 master copies in the sharded optimizer; at stage 0, where DeepSpeed's own bf16 has
neither sharding nor readable state, it is autocast over fp32 weights. Gradients are accumulated in fp32 where the stage can.

State leaves and enters whole (fp32 by parameter name), so a checkpoint fits any number of ranks and any stage. That needs some of
DeepSpeed's private API (marked), which tests/distributed/test_engine.py holds for every stage and precision.
"""

import datetime
import logging
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed.distributed_c10d as c10d
from torch import Tensor, nn
from torch.optim import Optimizer

from data_prep.settings import SettingsError
from pretrain.augment.augmentation import Prepared
from pretrain.config import EngineSettings
from pretrain.models.kept_buffers import average_over_ranks, kept_buffers, restore_buffers
from pretrain.optim import set_lr
from pretrain.order import BatchPlan
from pretrain.step import EngineState, StepResult, loss_of
from pretrain.world import World


def _import_deepspeed() -> Any:
    """deepspeed without mlflow (its autotuner imports it if it can, which costs four seconds) and without its greetings."""
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # or it warns that it found nothing better
    hidden = sys.modules.get("mlflow")
    sys.modules["mlflow"] = None  # type: ignore[assignment]
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import deepspeed
            from deepspeed.utils import logger
        logger.setLevel(logging.ERROR)
    finally:
        if hidden is None:
            del sys.modules["mlflow"]
        else:
            sys.modules["mlflow"] = hidden
    return deepspeed


deepspeed = _import_deepspeed()


def start_distributed(world: World, *, timeout_s: float) -> torch.device:
    """Joins the ranks and returns this rank's device."""
    on_gpu, num_gpus = torch.cuda.is_available(), torch.cuda.device_count()
    if on_gpu and world.local_rank >= num_gpus:
        raise SettingsError(
            f"--ranks: local rank {world.local_rank} has no GPU, {num_gpus} are visible; start one rank per GPU"
        )
    device = torch.device("cuda", world.local_rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    timeout = datetime.timedelta(seconds=timeout_s)
    # The shared-memory op is compiled on first use (35 s, and a stale lock file hangs it); gloo needs no help.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("nccl" if on_gpu else "gloo", timeout=timeout, verbose=False)
    c10d.default_pg_nccl_timeout = timeout  # type: ignore[attr-defined]
    c10d.default_pg_timeout = timeout  # DeepSpeed's own groups are made without one, and would wait 30 minutes
    return device


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
    ):
        self.device, self.settings, self.plan, self.world = device, settings, plan, world
        self.label_smoothing = label_smoothing
        in_bf16 = settings.precision == "bf16" and settings.zero_stage > 0
        self.input_dtype = torch.bfloat16 if in_bf16 else torch.float32
        model = model.to(device)
        self._engine, self._optimizer, _, _ = deepspeed.initialize(
            model=model, optimizer=make_optimizer(model), config=self._config(in_bf16=in_bf16)
        )
        if settings.compile:
            self._engine.compile()

    def _config(self, *, in_bf16: bool) -> dict[str, Any]:
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": self.plan.local_batch_size,
            "gradient_accumulation_steps": self.plan.accumulation_steps,
            "gradient_clipping": self.settings.gradient_clip_norm,  # always said: the default is 1.0 since 0.19.3
            "zero_optimization": {"stage": self.settings.zero_stage},
            "zero_allow_untested_optimizer": True,
            "steps_per_print": 10**9,
        }
        if self.settings.precision == "bf16" and not in_bf16:
            # through DeepSpeed: it switches off an autocast that it was not told of
            config["torch_autocast"] = {"enabled": True, "dtype": "bfloat16"}
        if in_bf16:
            config["bf16"] = {"enabled": True}
            # fp32 accumulation at stage 1 would switch to DeepSpeed's BF16_Optimizer, another class with another state
            if self.settings.zero_stage in (2, 3):
                config["data_types"] = {"grad_accum_dtype": "fp32"}
        return config

    def train_step(self, micro_batches: Sequence[Prepared], *, lr: float) -> StepResult:
        assert len(micro_batches) == self.plan.accumulation_steps, len(micro_batches)
        self._engine.train()
        set_lr(self._optimizer, lr)
        total = torch.zeros((), device=self.device)
        norm: Tensor | None = None
        for batch in micro_batches:
            logits = self._engine(batch.images_BCHW)
            assert logits.dtype == (torch.bfloat16 if self.settings.precision == "bf16" else torch.float32), (
                logits.dtype
            )
            loss = loss_of(logits, batch, label_smoothing=self.label_smoothing)
            self._engine.backward(loss)
            if self.settings.zero_stage == 0 and self._engine.is_gradient_accumulation_boundary():
                norm = self._plain_gradient_norm()
            self._engine.step()
            total += loss.detach() / len(micro_batches)
        return StepResult(loss=total, gradient_norm=norm if norm is not None else self._engine.get_global_grad_norm())

    def logits(self, images: Tensor) -> Tensor:
        if self._engine.module.training:
            average_over_ranks(self._engine.module)
        self._engine.eval()
        with torch.no_grad():
            logits: Tensor = self._engine(images)
        return logits.float()

    def weight(self, name: str) -> Tensor | None:
        parameter = self._engine.module.get_parameter(name)
        if self.settings.zero_stage == 3:  # in shards, that all ranks put together
            parameter = deepspeed.utils.safe_get_full_fp32_param(parameter)
        return parameter.detach() if self.world.is_first else None

    def export_state(self) -> EngineState:
        weights: dict[str, Tensor] = {}
        optimizer: dict[str, Tensor] = {}
        average_over_ranks(self._engine.module)
        self._link_state()
        for name, parameter in self._engine.module.named_parameters():
            full = self._full_tensors(parameter)
            if self.world.is_first:
                weights[name] = full.pop("weight")
                optimizer.update({f"{kind}.{name}": tensor for kind, tensor in full.items()})
        weights |= kept_buffers(self._engine.module)
        if not self.world.is_first:
            return EngineState()
        return EngineState(weights, optimizer, self._num_updates())

    def import_state(self, state: EngineState) -> None:
        kinds = sorted({name.partition(".")[0] for name in state.optimizer})
        self._engine.global_steps = state.num_updates
        self._create_state(kinds, state.num_updates)
        self._link_state()
        for name, parameter in self._engine.module.named_parameters():
            tensors = {kind: state.optimizer[f"{kind}.{name}"] for kind in kinds}
            self._set_tensors(parameter, tensors | {"weight": state.weights[name]})
        restore_buffers(self._engine.module, state.weights)
        self._refresh_working_weights()

    # ---- one parameter's tensors ---------------------------------------------------------------------------------

    def _full_tensors(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """fp32 copies of the weight and of its optimizer state, on the CPU."""
        kinds = self._state_kinds()
        if self.settings.zero_stage == 0:
            tensors = {"weight": parameter} | {kind: self._optimizer.state[parameter][kind] for kind in kinds}
        else:
            utils = deepspeed.utils
            tensors = {kind: utils.safe_get_full_optimizer_state(parameter, kind) for kind in kinds}
            tensors["weight"] = utils.safe_get_full_fp32_param(parameter)
        return {kind: tensor.detach().float().cpu().clone().contiguous() for kind, tensor in tensors.items()}

    def _set_tensors(self, parameter: nn.Parameter, tensors: dict[str, Tensor]) -> None:
        stage = self.settings.zero_stage
        for kind, tensor in tensors.items():
            value = tensor.to(self.device)
            if stage == 0:
                target = parameter.data if kind == "weight" else self._optimizer.state[parameter][kind]
                target.copy_(value)
            elif stage == 3:
                self._set_partition(parameter, value, kind=None if kind == "weight" else kind)
            elif kind == "weight":
                deepspeed.utils.safe_set_full_fp32_param(parameter, value)
            else:
                deepspeed.utils.safe_set_full_optimizer_state(parameter, value, kind)

    def _set_partition(self, parameter: Any, value: Tensor, *, kind: str | None) -> None:
        """This rank's slice at stage 3 (private: `safe_set_*` fails there when a parameter is padded)."""
        ranks = self.world.num_ranks
        flat = nn.functional.pad(value.flatten(), (0, -parameter.ds_numel % ranks))
        target, _ = self._optimizer._get_fp32_opt_state_partition(
            parameter, release_swap_buffers=False, optim_state_key=kind
        )
        target.data.copy_(flat.narrow(0, target.numel() * self.world.rank, target.numel()))

    # ---- DeepSpeed's private state ----------------------------------------------------------------------------------

    def _flat_parameters(self) -> list[Tensor]:
        """What the wrapped optimizer really steps: this rank's shards, or the parameters themselves at stage 0."""
        if self.settings.zero_stage == 3:
            return list(self._optimizer.fp32_partitioned_groups_flat)
        return [parameter for group in self._plain_optimizer().param_groups for parameter in group["params"]]

    def _plain_optimizer(self) -> Any:
        return self._optimizer if self.settings.zero_stage == 0 else self._optimizer.optimizer

    def _state_kinds(self) -> list[str]:
        """Names of the per-weight state tensors, the same on every rank (a rank may own no weights of a group)."""
        state = self._plain_optimizer().state
        kinds = {
            kind for values in state.values() for kind, value in values.items() if torch.is_tensor(value) and value.ndim
        }
        return sorted(kinds)

    def _num_updates(self) -> int:
        for values in self._plain_optimizer().state.values():
            if "step" in values:
                return int(values["step"])
        return int(self._engine.global_steps)

    def _create_state(self, kinds: list[str], num_updates: int) -> None:
        """What the first step would have made, so that there is something to fill."""
        plain = self._plain_optimizer()
        for parameter in self._flat_parameters():
            for kind in kinds:
                plain.state[parameter].setdefault(kind, torch.zeros_like(parameter))
            if isinstance(plain, torch.optim.AdamW):
                plain.state[parameter]["step"] = torch.tensor(float(num_updates), device=parameter.device)

    def _link_state(self) -> None:
        """Private: stages 1 and 2 link only the first group's state to the parameters unless they are told to do it again."""
        if self.settings.zero_stage in (1, 2) and self._state_kinds():
            self._optimizer._hp_optimizer_states_linked = False
            self._optimizer._lazy_init_hp_params_optimizer_state()

    def _refresh_working_weights(self) -> None:
        """The low-precision (or gathered) weights from the master copies."""
        optimizer = self._optimizer
        if self.settings.zero_stage in (1, 2):
            optimizer.update_lp_params()
        elif self.settings.zero_stage == 3:
            for number, flat in enumerate(optimizer.fp16_partitioned_groups_flat):
                flat.data.copy_(optimizer.fp32_partitioned_groups_flat[number].data)
                group = optimizer.fp16_partitioned_groups[number]
                for target, source in zip(group, optimizer.unflatten(flat, group), strict=True):
                    target.data = source.data
            if len(optimizer.persistent_parameters) > 0:
                optimizer.persistent_parameters[0].partition(optimizer.persistent_parameters)
                optimizer.persistent_parameters[0].all_gather(optimizer.persistent_parameters)

    def _plain_gradient_norm(self) -> Tensor:
        gradients = [parameter.grad for parameter in self._engine.module.parameters() if parameter.grad is not None]
        return nn.utils.get_total_norm(gradients)
