"""Our engine settings in DeepSpeed's words: what `deepspeed.initialize` is told, and why. No deepspeed and no torch here."""

from typing import Any

from pretrain.config import EngineSettings
from pretrain.data.order import BatchPlan
from pretrain.engine.zero_cost import bucket_elements

LOSS_SCALE = {"init_scale": 2**16, "scale_window": 1000, "min_scale": 1, "delayed_shift": 2}
"""fp16: where the scale starts, after how many good steps it doubles, its floor, and which overflow in a row halves it."""
FP16_CONFIG = {
    "loss_scale": 0,  # dynamic
    "initial_scale_power": LOSS_SCALE["init_scale"].bit_length() - 1,
    "loss_scale_window": LOSS_SCALE["scale_window"],
    "min_loss_scale": LOSS_SCALE["min_scale"],
    "hysteresis": LOSS_SCALE["delayed_shift"],
}
"""The same in the words of DeepSpeed's config."""


def deepspeed_config(settings: EngineSettings, plan: BatchPlan, *, num_parameters: int, on_gpu: bool) -> dict[str, Any]:
    stage, cpu = settings.zero_stage, {"device": "cpu", "pin_memory": on_gpu}
    bucket = bucket_elements(num_parameters)
    zero: dict[str, Any] = {
        "stage": stage,
        "reduce_bucket_size": bucket,
        "allgather_bucket_size": bucket,
        # or stage 3 would hold the whole of any model below a billion weights from forward to backward
        "stage3_prefetch_bucket_size": bucket // 8,
        "stage3_max_reuse_distance": bucket // 8,
        "stage3_max_live_parameters": bucket // 2,
    }
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
        "timers": {"throughput": {"enabled": False}},  # or it waits for the device twice in each micro-batch
    }
    if stage and settings.precision != "fp32":
        config[settings.precision] = {"enabled": True}
        if settings.precision == "fp16":
            config["fp16"] |= FP16_CONFIG
        # bf16 at stage 1 would switch to DeepSpeed's BF16_Optimizer, another class with another state
        if stage > 1 or settings.precision == "fp16":
            config["data_types"] = {"grad_accum_dtype": "fp32"}
    return config
