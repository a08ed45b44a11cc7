import pandas as pd
from claims.decisions import KINDS, Comparison, difference, errors_and_rates, weak_arms
from claims.locality import lines_of
from claims.transfer import LOGISTIC_ERRORS
from claims.width import WORDS, compare_shapes, errors_by_shape
from frame import markdown

LOGISTIC_ERROR = LOGISTIC_ERRORS["clip-art-100"]


def clip_art(results: pd.DataFrame) -> list[str]:
    """Decide docs/findings/clip_art.md: width with seeds 85 to 89, locality with 90 to 94."""
    is_width = results.seed.astype(int) < 90
    errors, shapes = errors_by_shape(results[is_width], 3)
    rows = []
    for kind in KINDS:
        differences, is_least = compare_shapes(errors[kind])
        holds = "not tested" if weak_arms(errors[kind], LOGISTIC_ERROR) else WORDS[is_least]
        rows.append([kind, differences, holds])
    errors, rates = errors_and_rates(results[~is_width], ("variant", "network"), 30)
    cost = errors["permuted"] - errors["in-order"]
    comparisons = [
        Comparison("2", "cost: `mixer`", cost["mixer"], "above", ("mixer",)),
        difference("3", "cost: ", cost, "mixer", "rp", "above"),
    ]
    weak = weak_arms(errors["in-order"], LOGISTIC_ERROR)
    return [
        f"Logistic regression has a test error of {LOGISTIC_ERROR:.2f} %.",
        "",
        *shapes,
        "",
        *markdown(("Mixer", "rule 1 of width", "holds"), rows),
        "",
        *lines_of(errors, rates, comparisons, weak, ("dense",)),
    ]
