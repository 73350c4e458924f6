"""Find out which weights a class of transformers has, and how their names in files become their names in memory.

This module imports torch and transformers.

It runs as a script in a child process (see `model_class`), so it imports no other module of this package:

    python -I class_child.py < request      request and answer are JSON; stdout contains only the answer

The class is instantiated on the meta device, which allocates no weights. Only transformers' own classes are used:
Python code in a repository is never imported, and nothing is downloaded.

Names and layouts are converted by transformers itself, with tensors that have no data but record where their items come
from (`_Traced`). The record is an expression: the name of a tensor, or ``[operation, arguments, inputs]``:

    ["concat", [dim], [a, b]]  ["stack", [dim], [a, b]]  ["slice", [dim, start, size], [a]]  ["index", [dim, i], [a]]
    ["permute", [dims], [a]]   ["reshape", [shape], [a]]

It is None after an operation that computes values, or that this module does not know.
"""

from __future__ import annotations

import json
import logging
import os
import re
import resource
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from importlib.util import find_spec
from typing import Any

_BYTES_OF_MAXRSS = 1 if sys.platform == "darwin" else 1024  # macOS counts bytes, Linux KiB
# A line ``NAME | CONVERSION ..`` in the load report that transformers logs: it could not convert tensors to NAME.
_CONVERSION = re.compile(r"^(\S+)\s*\|\s*CONVERSION\b", re.MULTILINE)

# Buffers that older releases stored; all classes ignore them.
_IGNORED = (r"rotary_emb\.inv_freq", r"(^|\.)position_ids$")


def answer(request: Mapping[str, Any]) -> dict[str, Any]:
    """Answer one request: describe a class, or check whether it loads given tensors.

    Args:
        request: ``class`` (its name) and ``config`` (of config.json); for a check also ``tensors``: name -> [shape,
            torch's name of the dtype]; for the names in memory, ``stored``: the same of the tensors of files.

    Returns:
        For a check, ``{"problems": [...]}``. For names in memory, see `_to_memory`. For a description:

            "forms"         name -> shape of all tensors, first in memory, then in files
            "ties"          name -> the name it is tied to, in both forms; where they differ, in files
            "memory_ties"   the same, in memory only
            "modules"       name of a Linear or Conv1D module -> whether its weight is [in, out]
            "in_files"      name in files -> the expression that makes it from tensors in memory
            "unsaved"       names in memory that files lack

        If there is no answer, ``{"unknown": reason}``, with ``"is_absent"`` if transformers or the class is missing.
    """
    model_class = transformers_class(request["config"], request["class"])
    if isinstance(model_class, str):
        return {"unknown": model_class, "is_absent": True}
    try:
        # A class's warnings about settings must be neither shown nor, under -W error, taken for no answer.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if "stored" in request:
                return _to_memory(model_class, request["config"], request["stored"])
            if "tensors" in request:
                return _load(model_class, request)
            return _describe(model_class, request["config"])
    except Exception as error:  # noqa: BLE001  a model's code may raise anything for unsupported settings
        return {"unknown": f"{type(error).__name__}: {error}"}


def transformers_class(config: Mapping[str, Any], name: str) -> Any:
    """Return the class of transformers with this name, or a text that says why there is none."""
    try:
        import torch  # noqa: F401  transformers can be imported without torch, but then has no models
        import transformers
    except ImportError as error:
        return str(error)
    model_class: Any = getattr(transformers, name, None)
    if isinstance(model_class, type) and issubclass(model_class, transformers.PreTrainedModel):
        return model_class
    # auto_map: the class is defined in a Python file of the repository.
    code = "; code of the repository itself is not run" if config.get("auto_map") else ""
    return f"transformers {transformers.__version__} has no class {name}{code}"


def _describe(model_class: Any, config: Mapping[str, Any]) -> dict[str, Any]:
    """Describe a class with these settings: the entries ``forms``, ``ties`` and ``modules`` of an answer."""
    import torch
    from transformers.core_model_loading import revert_weight_conversion
    from transformers.pytorch_utils import Conv1D

    model = on_meta(model_class, config)
    tensors = model.state_dict()
    unsaved = [name for name in model._keys_to_ignore_on_save or () if name in tensors]
    traced = {
        name: _traced(name, tensor.shape, torch.float32)
        for name, tensor in tensors.items()
        if name not in unsaved
    }
    in_files = revert_weight_conversion(model, traced)
    ties, memory_ties = ties_of(model)
    kinds = (torch.nn.Linear, Conv1D)
    return {
        "forms": [{n: list(t.shape) for n, t in form.items()} for form in (tensors, in_files)],
        "ties": ties,
        "memory_ties": memory_ties,
        "modules": {n: isinstance(m, Conv1D) for n, m in model.named_modules() if isinstance(m, kinds)},
        "in_files": {name: tensor.expression for name, tensor in in_files.items()},
        "unsaved": unsaved,
    }


def ties_of(model: Any) -> tuple[dict[str, str], dict[str, str]]:
    """Return a model's ties, name -> the name it is tied to: in both forms (where they differ, in files); in memory."""
    from transformers.core_model_loading import revert_weight_conversion

    tensors = model.state_dict()
    ties = dict(model.get_expanded_tied_weights_keys(all_submodels=True))
    names: dict[str, str] = {}  # name in memory -> name in files
    # Converted one by one: the conversion of all tensors does not say which name became which.
    for name in {*ties, *ties.values()} & tensors.keys():
        renamed = list(revert_weight_conversion(model, {name: tensors[name]}))
        names[name] = renamed[0] if len(renamed) == 1 else name
    return {**ties, **{names.get(a, a): names.get(b, b) for a, b in ties.items()}}, ties


def on_meta(model_class: Any, config: Mapping[str, Any]) -> Any:
    """Instantiate a class on the meta device, with the settings of a config.json."""
    import torch

    with torch.device("meta"):
        return model_class(_settings(model_class, config))


def _settings(model_class: Any, config: Mapping[str, Any]) -> Any:
    """Return a class's config with the settings of a config.json."""

    def plain(value: Any) -> Any:
        if isinstance(value, list):
            return [plain(item) for item in value]
        if not isinstance(value, dict):
            return value
        if value.keys() == {"__float__"}:  # how transformers writes what JSON lacks: Infinity, -Infinity, NaN
            return float(value["__float__"])
        return {key: plain(item) for key, item in value.items()}

    return model_class.config_class.from_dict(plain(dict(config)))


def _to_memory(
    model_class: Any, config: Mapping[str, Any], stored: Mapping[str, tuple[Sequence[int], str]]
) -> dict[str, Any]:
    """Load tensors of files into the class, and return what each of its tensors is made from.

    Returns:
        ``"in_memory"``: name in memory -> expression; ``"ignored"``: names in files that the class ignores silently;
        ``"computed"``: names in memory that files may lack;
        ``"problems"``: one text for each tensor that the class cannot make from the given tensors.
    """
    import torch
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import convert_and_load_state_dict_in_model
    from transformers.modeling_utils import LoadStateDictConfig
    from transformers.utils import logging

    model = on_meta(model_class, config)
    # Counters and masks keep the dtype of the files, which the class does not cast then.
    numbers = {t.dtype for t in model.state_dict().values() if not t.is_floating_point()}
    traced = {
        name: _traced(name, shape, own if (own := getattr(torch, dtype)) in numbers else torch.float32)
        for name, (shape, dtype) in stored.items()
    }
    settings = LoadStateDictConfig(
        device_map={"": "meta"},
        weight_mapping=get_model_conversion_mapping(model),
        ignore_mismatched_sizes=True,  # list all mismatched shapes
    )
    is_shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        info, _ = convert_and_load_state_dict_in_model(model, traced, settings)
    finally:
        if is_shown:
            logging.enable_progress_bar()
    loaded = {name: t for name, t in model.state_dict().items() if isinstance(t, _traced_class())}
    made = {name: tensor.expression for name, tensor in loaded.items()}
    ignored = [*(model._keys_to_ignore_on_load_unexpected or ()), *_IGNORED]
    return {
        "in_memory": made,
        "ignored": _matching(info.unexpected_keys & stored.keys(), ignored),
        "computed": _matching(info.missing_keys, model._keys_to_ignore_on_load_missing or ()),
        "problems": [
            *(
                f"{name} would be {list(given)}, the class has {list(expected)}"
                for name, given, expected in sorted(info.mismatched_keys)
            ),
            *(f"{name}: {text.splitlines()[-1]}" for name, text in sorted(info.conversion_errors.items())),
        ],
    }


def _matching(names: Iterable[str], patterns: Iterable[str]) -> list[str]:
    """Return the names that contain a match of any of the regular expressions."""
    return sorted(name for name in names if any(re.search(pattern, name) for pattern in patterns))


@cache
def _traced_class() -> Any:
    """Return the class `_Traced`. It is made here, because this module imports torch, its base class's home, late."""
    import torch

    from vescale_fsdp.torch_private import versions_of

    tensor_class: Any = torch.Tensor  # to type checkers, `data` is a tensor rather than a descriptor
    set_data = tensor_class.data.__set__

    class _Traced(torch.Tensor):
        """A tensor on the meta device that records which items of which named tensors it consists of."""

        expression: Any = None  # None after an operation that does not only move items

        @classmethod
        def __torch_function__(
            cls, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
        ) -> Any:
            given = kwargs or {}
            if func.__name__ == "__get__":  # an attribute, such as `_version` below
                return super().__torch_function__(func, types, args, given)
            traced = [each for each in (*args, *given.values()) if isinstance(each, cls)]
            versions = versions_of(traced)
            result = super().__torch_function__(func, types, args, given)
            # A tensor that was written no longer has the items that its expression, or that of a view of it, says.
            if func == set_data or versions != versions_of(traced):
                raise NotImplementedError(
                    f"the class writes to weights while it converts them ({func.__name__})"
                )
            record = _RECORDS.get(func.__name__)
            if record is not None:
                record(result, *args, **given)
            return result

    return _Traced


def _traced(name: str, shape: Sequence[int], dtype: Any) -> Any:
    import torch

    tensor = torch.empty(tuple(shape), dtype=dtype, device="meta").as_subclass(_traced_class())
    tensor.expression = name
    return tensor


def _same(result: Any, tensor: Any, *_: Any, **__: Any) -> None:
    is_same = result.dtype == tensor.dtype or (result.is_floating_point() and tensor.is_floating_point())
    result.expression = tensor.expression if is_same else None


def _moved(operation: str, arguments: list[Any], *inputs: Any) -> Any:
    """Return the expression of an operation; None if an input has none."""
    parts = [each.expression for each in inputs]
    return None if None in parts else [operation, arguments, parts]


def _record_reshape(result: Any, tensor: Any, *_: Any, **__: Any) -> None:
    made = _moved("reshape", [list(result.shape)], tensor)
    if result.dtype != tensor.dtype:  # a view of the bytes as another type
        made = None
    elif result.shape == tensor.shape:
        made = tensor.expression
    elif (
        tensor.expression and tensor.expression[0] == "slice"
    ):  # of one item, whose dim `squeeze` has removed
        dim, start, size = tensor.expression[1]
        if size == 1 and result.shape == (*tensor.shape[:dim], *tensor.shape[dim + 1 :]):
            made = ["index", [dim, start], tensor.expression[2]]
    result.expression = made


def _record_join(operation: str) -> Callable[..., None]:
    def record(result: Any, tensors: Sequence[Any], dim: int = 0) -> None:
        result.expression = _moved(operation, [dim % result.ndim], *tensors)

    return record


def _record_parts(result: Sequence[Any], tensor: Any, _: Any, dim: int = 0) -> None:
    """Record the results of `chunk` and `split`."""
    start, dim = 0, dim % tensor.ndim
    for part in result:
        part.expression = _moved("slice", [dim, start, part.shape[dim]], tensor)
        start += part.shape[dim]


def _record_unbind(result: Sequence[Any], tensor: Any, dim: int = 0) -> None:
    for index, part in enumerate(result):
        part.expression = _moved("index", [dim % tensor.ndim, index], tensor)


def _record_transpose(result: Any, tensor: Any, dim0: int, dim1: int) -> None:
    dims = list(range(tensor.ndim))
    dims[dim0], dims[dim1] = dims[dim1], dims[dim0]
    result.expression = _moved("permute", [dims], tensor)


def _record_permute(result: Any, tensor: Any, *dims: Any) -> None:
    order = dims[0] if len(dims) == 1 else dims
    result.expression = _moved("permute", [[dim % tensor.ndim for dim in order]], tensor)


def _record_item(result: Any, tensor: Any, index: Any) -> None:
    if index is Ellipsis:
        result.expression = tensor.expression


_SAME = ("contiguous", "clone", "detach", "to", "requires_grad_", "cpu")
_RECORDS: Mapping[str, Callable[..., None]] = {
    **dict.fromkeys(_SAME, _same),
    **dict.fromkeys(("reshape", "view", "flatten", "squeeze", "unsqueeze"), _record_reshape),
    **dict.fromkeys(("chunk", "split"), _record_parts),
    **dict.fromkeys(("transpose", "swapaxes"), _record_transpose),
    "cat": _record_join("concat"),
    "stack": _record_join("stack"),
    "unbind": _record_unbind,
    "permute": _record_permute,
    "__getitem__": _record_item,
}


def _load(model_class: Any, request: Mapping[str, Any]) -> dict[str, Any]:
    """Load tensors of the meta device with ``from_pretrained``, and return the problems that it reports.

    ``from_pretrained`` applies the class's own renames, ties and quantizer.
    """
    import torch

    if find_spec("accelerate") is None:  # transformers needs it for a device map
        return {"unknown": "accelerate is not installed"}
    tensors = {
        name: torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
        for name, (shape, dtype) in request["tensors"].items()
    }
    reports = _Reports()
    logger = logging.getLogger("transformers.modeling_utils")
    logger.addHandler(reports)
    is_quantized = False
    try:
        config = _settings(model_class, request["config"])
        # The setting may be in the config of the text part, as of a model for text and images.
        is_quantized = any(
            getattr(part, "quantization_config", None)
            for part in (config, config.get_text_config(decoder=True))
        )
        _, info = model_class.from_pretrained(
            None,  # no folder: the tensors are passed as a state dict
            config=config,
            state_dict=tensors,
            device_map="meta",
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # list all mismatched shapes instead of raising for the first
            local_files_only=True,
        )
    except ImportError as error:  # a quantizer or a class needs another package
        return {"unknown": str(error).strip()}
    except Exception as error:  # noqa: BLE001  transformers may raise anything for tensors that do not fit
        failed = sorted(set(_CONVERSION.findall(reports.text)))
        if is_quantized:
            return {"unknown": f"{type(error).__name__}: {error}"}
        if failed:
            return {"problems": [f"cannot be converted from the given tensors: {name}" for name in failed]}
        return {"problems": [f"the class raises {type(error).__name__}: {error}"]}
    finally:
        logger.removeHandler(reports)
    return {
        "problems": [
            *(f"missing: {name}" for name in sorted(info["missing_keys"])),
            *(f"unexpected: {name}" for name in sorted(info["unexpected_keys"])),
            *(
                f"wrong shape: {name} is {list(given)}, the class has {list(expected)}"
                for name, given, expected in sorted(info["mismatched_keys"])
            ),
            *map(str, info["error_msgs"]),
        ]
    }


class _Reports(logging.Handler):
    """Collects the warnings and errors of a logger as text."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.text = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.text += record.getMessage()


def main() -> None:
    """Read a request from stdin and write the answer to stdout; what libraries print to stdout goes to stderr."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # on the file descriptor, which C libraries write to
    request = json.load(sys.stdin)
    sys.path[:] = request["path"]  # the parent's: ``-I`` ignores PYTHONPATH and the user's site-packages
    reply = answer(request)
    reply["peak_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _BYTES_OF_MAXRSS
    with out:
        json.dump(reply, out)


if __name__ == "__main__":
    main()
