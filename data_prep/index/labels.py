"""The label of a sample: the digits of `KEY.cls`, or an integer or a word in `KEY.json`."""

import json
import re

MAX_CLASSES = 1 << 20
UNLABELLED = -1
_NUMBER = re.compile(rb"\s*[+-]?[0-9]{1,18}\s*")


class BadSample(Exception):  # noqa: N818 (expected, like images.Rejection)
    def __init__(self, reason: str, detail: str):
        super().__init__(reason, detail)
        self.reason, self.detail = reason, detail


def label_of(data: bytes, kind: str, *, classes: dict[str, int] | None) -> int | str:
    """A number, or a word where `classes` does not number the words; `kind` is cls or json:FIELD.SUBFIELD. Raises BadSample."""
    if kind == "cls":
        if not _NUMBER.fullmatch(data):
            raise BadSample("bad_label", f"{data[:40]!r} is not an integer")
        return _number(int(data), classes)
    value = _field(data, kind.partition(":")[2])
    return _word(value, classes) if isinstance(value, str) else _number(value, classes)


def _field(data: bytes, path: str) -> int | str:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        raise BadSample("bad_label", "is not JSON") from None
    for key in path.split("."):
        if not isinstance(value, dict) or key not in value:
            raise BadSample("no_label", f"its JSON has no {path}")
        value = value[key]
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise BadSample("bad_label", f"{path} is {str(value)[:40]!r}, which is neither an integer nor a class name")
    return value


def _number(value: int, classes: dict[str, int] | None) -> int:
    top = MAX_CLASSES if classes is None else len(classes)
    if not 0 <= value < top:
        raise BadSample("label_out_of_range", f"{value if abs(value) < 10**18 else 'huge'} is not in 0..{top - 1}")
    return value


def _word(value: str, classes: dict[str, int] | None) -> int | str:
    name = value.encode("utf-8", "backslashreplace").decode()  # JSON may hold halves of characters
    if classes is None:
        return name
    if name not in classes:
        raise BadSample("unknown_class", f"{name[:100]!r} is not in classes_file")
    return classes[name]
