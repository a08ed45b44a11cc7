import pandas as pd
from claims.decisions import Comparison, decide, errors_and_rates, titled, with_interval
from frame import markdown

TARGETS = {"digits": "Digits", "clip-art": "Clip art"}
NUMBERS = (10, 30, 100)
"""Numbers of labeled images of each class."""
STARTS = ("pretrained", "scratch")
LOGISTIC_ERRORS = {
    "digits-10": 10.47,
    "digits-30": 7.36,
    "digits-100": 5.01,
    "clip-art-10": 68.05,
    "clip-art-30": 59.95,
    "clip-art-100": 53.75,
}
"""Test error of logistic regression in percent, the mean over the labeled images of seeds 80 to 84.
`findings.py baseline data/transfer-digits-10-seed-107 data/transfer-digits-10-seed-8{0..4}` prints
the first. For 100 images a class, C is chosen with 60."""


def transfer(results: pd.DataFrame) -> list[str]:
    """Decide the claim of docs/findings/transfer.md."""
    tuned = results[results.error.notna()]  # the pretrainings have no test errors
    tuned = tuned.assign(lr=tuned.own_lr.fillna(tuned.lr))
    errors, rates = errors_and_rates(tuned, ("labeled", "init"), 60)
    gains = {
        images: errors[images, "scratch"] - errors[images, "pretrained"]
        for images in LOGISTIC_ERRORS
    }
    weak = {
        images
        for images, logistic in LOGISTIC_ERRORS.items()
        if errors[images].mean().max() >= logistic
    }
    few, _, many = NUMBERS
    comparisons = [
        Comparison(f"1 {images}", f"gain: `{images}`", gain, "above", (images,))
        for images, gain in gains.items()
    ]
    for target in TARGETS:
        a, b = f"{target}-{few}", f"{target}-{many}"
        words = f"gain: `{a}` minus `{b}`"
        comparisons.append(Comparison(f"2 {target}", words, gains[a] - gains[b], "above", (a, b)))
    outcomes, decisions = decide(comparisons, weak)
    conclusions = []
    for target, title in TARGETS.items():
        found = {number: next(iter(outcomes[f"1 {target}-{number}"])) for number in NUMBERS}
        conclusions += [f"{title}: {conclusion_of(found)}", ""]
    table = [
        [
            titled(images, weak),
            *(with_interval(errors[images, start]) for start in STARTS),
            with_interval(gain, "+"),
            f"{LOGISTIC_ERRORS[images]:.2f}",
            " / ".join(f"{rates[images, start]:g}" for start in STARTS),
        ]
        for images, gain in gains.items()
    ]
    header = ("images", *STARTS, "gain", "logistic regression", "learning rates")
    return [*markdown(header, table), "", *decisions, "", *conclusions[:-1]]


def conclusion_of(outcomes: dict[int, str]) -> str:
    """Return the conclusion for one target from the outcomes of rule 1."""
    numbers = {
        outcome: ", ".join(str(n) for n, each in outcomes.items() if each == outcome)
        for outcome in outcomes.values()
    }
    if numbers.keys() == {"yes"}:
        return "the claim holds."
    if numbers.keys() == {"equal"}:
        return "pretraining makes no difference."
    sentences = {
        "yes": "the claim holds for {} images a class only",
        "reversed": "pretraining harms with {} images a class",
        "equal": "pretraining makes no difference with {}",
        "undecided": "undecided with {}",
        "not tested": "not tested with {}",
    }
    return "; ".join(sentences[each].format(words) for each, words in numbers.items()) + "."
