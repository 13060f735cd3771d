"""What cannot be captured, said in the words of the user's own module.

`explain` turns what torch.export raised into a CaptureError that names the Python construct, the
file and line, and what to write instead. A line of an installed library is not the user's to
write: there it says which setting avoids the line, or that the model is not supported.
"""

from __future__ import annotations

import linecache
import os
import re
import sys
import sysconfig
import traceback
from collections.abc import Iterator
from functools import cache

import torch
from torch.fx import Node

from .torch_parts import instead_in

__all__ = [
    "PLACE",
    "CaptureError",
    "Place",
    "explain",
    "first_line",
    "is_own_file",
    "line_of",
    "misfit",
    "place_at",
    "place_of",
    "refused",
    "text_of",
    "unfollowed",
    "user_frame",
    "user_place",
]

PLACE = "shoal_line"
"""Key under which a node's `custom` metadata has `FILE:LINE: CODE` (dag/capture/places.py)."""

_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_STDLIB = sysconfig.get_paths()["stdlib"] + os.sep
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_PACKAGE = os.path.dirname(os.path.dirname(_OURS)) + os.sep
_WRAPPERS = os.path.join(_PACKAGE, "client", "models") + os.sep
"""Classes over the user's own, such as those that make a loss."""

Place = tuple[str, int, str]
"""File, line number, source text of the line."""


class CaptureError(ValueError):
    """A model that cannot become a graph; the message says where and what to write instead."""


def refused(where: str, reason: str, advice: str) -> CaptureError:
    """The error for a line (`line_of`): why it cannot be captured, and what the user can do. The
    `advice` is how to write the line, and is for a line of the user's own."""
    library = re.search(r"(?:site|dist)-packages[/\\](\w+)(.*?):\d+: (.*)", where)
    if library:
        advice = _without_writing(library[1], library[2], library[3])
    return CaptureError(f"{where}\n  {reason}: {advice}")


def _without_writing(library: str, file: str, code: str) -> str:
    """What helps against a line of code in `file` of an installed library."""
    if library != "transformers":
        return (
            f"this line is {library}'s, not yours: use another layer in its place, or a copy of "
            "this one in your own file, changed there"
        )
    family = re.search(r"models[/\\](\w+)", file)
    name = f"this model family ({family[1]})" if family else "a model that needs this line"
    if re.search("expert|moe|top_k", code + file):
        return (
            'set experts_implementation to "grouped_mm" (in [model] args or in from_pretrained; '
            'of a live model: model.set_experts_implementation("grouped_mm")); if that is set, '
            f"{name} is not supported: docs/models.md names those that are"
        )
    if re.search("attention|attn|mask", code + file):
        return (
            'set attn_implementation to "sdpa" or "eager" (in [model] args or in from_pretrained); '
            f"if that is set, {name} is not supported: docs/models.md names those that are"
        )
    return (
        f"{name} is not supported: docs/models.md names those that are; a setting of its config "
        "may avoid this line, and a copy of its modeling file as your own factory may be changed"
    )


@cache
def _is_users(file: str) -> bool:
    file = os.path.abspath(file)
    library = file.startswith(_STDLIB) and "site-packages" not in file
    return os.path.isfile(file) and not library and not file.startswith((_OURS, _TORCH, _WRAPPERS))


@cache
def is_own_file(file: str) -> bool:
    """Whether a file is the user's own: no installed library's, and none of Shoal's."""
    if not file or not _is_users(file) or re.search(r"(?:site|dist)-packages", file):
        return False
    inside = os.path.abspath(file).removeprefix(_PACKAGE)
    shows = inside.startswith(("tests", "examples", "benchmarks"))  # models to try Shoal with
    return shows or inside == os.path.abspath(file)


def place_of(error: BaseException) -> Place | None:
    """The innermost line of the user's code in an error's traceback."""
    frames = list(traceback.extract_tb(error.__traceback__))
    # The frames above our wrapper are the caller's, not the model's.
    ours = [i for i, f in enumerate(frames) if f.filename == _OURS + "capture/export.py"]
    below = frames[ours[-1] + 1 :] if ours else []
    for frame in reversed(below):
        if _is_users(frame.filename):
            return frame.filename, frame.lineno or 0, (frame.line or "").strip()
    return None


def user_frame() -> tuple[str, int] | None:
    """File and number of the innermost line of the user's code that is running now."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
        if _is_users(frame.f_code.co_filename):
            return frame.f_code.co_filename, frame.f_lineno
    return None


def place_at(at: tuple[str, int] | None) -> Place | None:
    """A line with its text."""
    return None if at is None else (*at, linecache.getline(*at).strip())


def user_place() -> Place | None:
    """Return the line of `user_frame` with its text."""
    return place_at(user_frame())


def line_of(node: Node) -> str:
    """`FILE:LINE: CODE` of the user's line that made a node, or the path of its module."""
    noted = (node.meta.get("custom") or {}).get(PLACE)
    if noted:
        return str(noted)
    trace = str(node.meta.get("stack_trace") or "")
    for file, line in reversed(re.findall(r'File "(.+)", line (\d+)', trace)):
        if _is_users(file):
            return text_of(place_at((file, int(line))))
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    return f"module {stack[-1][0].removeprefix('module.')!r}" if stack else text_of(None)


_HINTS: tuple[tuple[str, str, str], ...] = (
    (r"\.(item|tolist)\(", "`.item()` or `.tolist()`", "keep the value a tensor"),
    (r"\.(numpy|data_ptr)\(", "`.numpy()`", "use torch functions on the tensor itself"),
    (r"\bdeepcopy\(|\bcopy\.copy\(", "a copy of a module", "call the module itself"),
    (r"\bprint\(|\bf[\"']|\.format\(", "printing a tensor's value", "return it as a metric"),
    (
        r"^(el)?if\b|^assert\b|\bif\b.*\belse\b",
        "a branch on data",
        "use torch.where(condition, a, b), or multiply by a mask",
    ),
    (r"^while\b", "a loop whose length depends on data", "use a fixed number of iterations"),
    (
        r"^for\b|\brange\(",
        "a Python loop over a tensor",
        "use one tensor operation over the whole dimension",
    ),
    (
        r"\b(int|float|bool)\(",
        "conversion of a tensor to a Python number",
        "keep the value a tensor",
    ),
)


_OTHER_DATA = (
    "without data.kind a batch is text as token numbers, (samples, length) of int64; "
    'expected e.g. kind = "arrays" for inputs of numbers'
)
_MISFITS: tuple[tuple[str, str], ...] = (
    (
        r"same dtype|expected scalar type|expected m1 and m2|indices.*(expected|scalar types)"
        r"|should be the same|: expected int64 as input is|not implemented for '(Long|Int)'",
        f"the input has another dtype than this layer takes: is data.kind the model's? "
        f"{_OTHER_DATA}",
    ),
    (
        r"shapes? cannot be multiplied|same reduction dim|size of tensor|size mismatch"
        r"|sizes? .*must match|must match .*sizes?|normalized_shape|expected .*(channels|dim)"
        r"|(not broadcastable|broadcast)|is invalid for input of size",
        "two widths or shapes do not fit: look at the widths of this layer and of the one before "
        f"it, at model.args, and at data.kind and data.length ({_OTHER_DATA})",
    ),
)
"""Faults of sizes and dtypes, by what torch says of them, and what to look at."""


def misfit(said: str) -> str:
    """What to look at where torch, or our own check of an operator, has said that sizes or dtypes
    do not fit; empty: it said something else."""
    found = (a for pattern, a in _MISFITS if re.search(pattern, said, re.IGNORECASE))
    return next(found, "")


def _construct(code: str) -> tuple[str, str]:
    for pattern, construct, advice in _HINTS:
        if re.search(pattern, code):
            return construct, advice
    return "a Python value that depends on data", "use torch operations, e.g. torch.where"


def text_of(place: Place | None) -> str:
    """`FILE:LINE: CODE` of a place."""
    return f"{place[0]}:{place[1]}: {place[2]}" if place else "the model's forward"


def first_line(error: BaseException) -> str:
    """What an error says, without what follows."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[0].strip() if lines else type(error).__name__


def _rule(guard: str) -> str:
    """A guard of torch's in the words of the user."""
    rule = re.sub(r"L\['[^]]*'\](\[\d+\])?\.size\(\)\[0\]", "batch", guard).rstrip(".")
    return re.sub(r" and batch <= IntInfinity\(\)", "", rule)


def _names(error: BaseException) -> Iterator[str]:
    for kind in type(error).__mro__:
        yield kind.__name__


def unfollowed(place: Place | None) -> CaptureError:
    """The error for a tensor that comes from where torch.export does not look: through `.data`,
    where a line has it."""
    if place is None:
        return refused(
            text_of(None),
            "a tensor comes from where no operator made it (a library's functools.lru_cache, other "
            "threads, callbacks, code that changes storages)",
            "make every tensor from the inputs and parameters with torch operations, in each call "
            "anew; where a library keeps one, write its few lines into the forward",
        )
    return refused(
        text_of(place),
        "`.data` is not followed by a capture, so what it gives or sets would be missing",
        "write .detach() for a value without its gradient; for a change, a new tensor (a limit on "
        "weights belongs into the forward that reads them, e.g. self.weight.clamp(-1, 1))",
    )


def explain(error: BaseException, batch_place: Place | None = None) -> CaptureError:
    """The CaptureError for what torch.export raised. `batch_place`: where the batch size was fixed,
    when that is what went wrong."""
    names = set(_names(error))
    place = place_of(error)
    if part := instead_in(error):
        return refused(text_of(place), *part)
    if "ConstraintViolationError" in names or "Constraints violated" in str(error):
        what = re.search(r"specialized it to be a constant \((\d+)\)", str(error))
        how = f"works for batch size {what[1]} only" if what else "does not take every batch size"
        code = batch_place[2] if batch_place else ""
        construct = "the code"
        if re.search(r"^for\b|\bunbind\(|\bfor\b.*\bin\b", code):
            construct = "a Python loop over the batch dimension"
        elif re.search(r"^(el)?if\b|^assert\b|^while\b", code):
            construct = "a branch on the batch size"
        rule = re.search(r"satisfy the generated guard (.+)", str(error))
        return refused(
            text_of(batch_place),
            f"{construct} {how}" + (f" (it needs {_rule(rule[1])})" if rule and not what else ""),
            "a microbatch may have any size. Write it for a batch dimension of any size "
            "(x.shape[0], -1 in view), with tensor operations over the whole batch",
        )
    if "GuardOnDataDependentSymNode" in names or "DataDependent" in "".join(names):
        construct, advice = _construct(place[2] if place else "")
        return refused(
            text_of(place), f"{construct} needs values that are known only at run time", advice
        )
    if place is not None:
        for pattern, construct, advice in _HINTS[:4]:
            if re.search(pattern, place[2]):
                return refused(
                    text_of(place),
                    f"{construct} cannot be captured",
                    f"{advice} ({type(error).__name__}: {first_line(error)})",
                )
    raised = f"forward raised {type(error).__name__} while it was captured ({first_line(error)})"
    if advice := misfit(str(error)):
        return refused(text_of(place), raised, advice)
    return refused(
        text_of(place),
        raised,
        "if it runs without Shoal, write this line with torch operations that do not depend on "
        "the values in a tensor",
    )
