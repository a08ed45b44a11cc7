import pandas as pd
from claims.decisions import (
    Comparison,
    conclude,
    decide,
    difference,
    errors_and_rates,
    titled,
    weak_arms,
    with_interval,
)
from frame import markdown

BATCHES = [f"{schedule}-{epochs}" for schedule in ("cosine", "constant") for epochs in (10, 40)]
"""Schedules and epochs that rule 6 of `mlp` compares."""


def mlp(results: pd.DataFrame) -> list[str]:
    """Decide the claim of docs/findings/mlp.md."""
    errors, rates = errors_and_rates(results, ("arm",), 100)
    weak = weak_arms(errors)
    gain = errors["inverted-mixup"] - errors["inverted"]
    other_gain = errors["standard-wide-mixup"] - errors["standard-wide"]
    arms = ("inverted-mixup", "inverted", "standard-wide-mixup", "standard-wide")
    comparisons = [
        *(
            difference(rule, "", errors, a, b, "below")
            for rule, a, b in (
                ("1", "inverted", "standard-wide"),
                ("1", "inverted", "standard-deep"),
                ("2 GELU", "deep-gelu", "standard-deep"),
                ("2 skip paths", "deep-skip", "deep-gelu"),
                ("2 bottleneck", "inverted", "deep-skip"),
                ("3", "inverted", "standard"),
                ("4", "cosine-40-batch-128", "inverted"),
                ("4", "inverted-mixup", "inverted"),
            )
        ),
        Comparison(
            "5",
            "MixUp's effect: `inverted` minus `standard-wide`",
            gain - other_gain,
            "below",
            arms,
        ),
        *(
            difference(f"6 {case}", "", errors, f"{case}-batch-512", f"{case}-batch-32", "below")
            for case in BATCHES
        ),
    ]
    outcomes, decisions = decide(comparisons, weak)
    sixth = {case: outcomes[f"6 {case}"] == {"yes"} for case in BATCHES}
    is_constant_only = [*sixth.values()] == [False, False, True, True]
    conclusion = conclude(
        {
            "The inverted bottleneck is better at equal compute.": outcomes["1"] == {"yes"},
            "Unequal compute can explain Table 1's difference.": outcomes["3"] == {"yes"}
            and outcomes["1"] != {"yes"},
            "Augmentation helps at this size.": outcomes["4"] == {"yes"},
            "Augmentation helps bottlenecks more than standard MLPs.": outcomes["5"] == {"yes"},
            "Larger batches are better at equal epochs.": all(sixth.values()),
            "Learning-rate decay removes the benefit of large batches.": is_constant_only,
        }
    )
    table = [
        [titled(arm, weak), with_interval(errors[arm]), f"{rate:g}"] for arm, rate in rates.items()
    ]
    steps = [
        [f"`{a}` minus `{b}`", with_interval(errors[a] - errors[b], "+")]
        for schedule in ("cosine", "constant")
        for few, many in ((32, 128), (128, 512))
        for a, b in [(f"{schedule}-40-batch-{many}", f"{schedule}-10-batch-{few}")]
    ]
    return [
        *markdown(("arm", "test error", "learning rate"), table),
        "",
        *decisions,
        "",
        conclusion,
        "",
        *markdown(("equal steps, four times as many images", "difference"), steps),
    ]
