"""Torch operators over pages: what a compiled graph calls in place of a function of ``ops``.

A compiled graph takes tensors and plain values, and refuses inputs that change and share a storage
in several dtypes, as the planes of a page do. So each operator takes the uint8 pages, which are all
that it changes, and the texts of layout and config; it makes the views itself. Its arguments are
those of the function, in their order, with ``views`` as ``pages`` and ``layout``, ``config`` as its
text and ``rows`` as their vectors. The same function runs behind it on every device.
"""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

import torch

from .config import StateConfig
from .state.layout import StateLayout, StateViews

NAMESPACE = "replayssm_quant"
LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")
"""Not ``torch.library.custom_op``: what that puts before a call takes longer than the call."""

P = ParamSpec("P")
R = TypeVar("R")
Given = Mapping[str, Any]
"""Arguments of an operator by name."""

_config = functools.lru_cache(maxsize=1024)(StateConfig.from_text)


def layout_of(given: Given) -> StateLayout:
    """The layout that an operator was given."""
    return StateLayout.from_text(given["layout"])


def like(name: str) -> Callable[[Given], torch.Tensor]:
    """A result of the shape and dtype of one argument."""
    return lambda given: torch.empty_like(given[name], memory_format=torch.contiguous_format)


def states(given: Given) -> torch.Tensor:
    """A result of fp32 states [b, H, R, N]."""
    g = layout_of(given).geometry
    shape = (given["slots"].shape[0], g.heads, g.rows, g.n)
    return given["pages"].new_empty(shape, dtype=torch.float32)


def unpacked(given: Given) -> torch.Tensor:
    """A result of [..., HV, V] of packed inputs [..., channels]."""
    g, mixed = layout_of(given).geometry, given["mixed_qkv"]
    return mixed.new_empty((*mixed.shape[:-1], g.heads, g.rows))


def nothing(given: Given) -> None:
    """No result."""


def _pages(views: StateViews) -> torch.Tensor:
    if views.pages is None:
        raise ValueError(
            "compiled code needs views of pages: make them with StateLayout.views, as a StatePool "
            "does"
        )
    return views.pages


def operator(
    result: Callable[[Given], torch.Tensor | None], *, changes: bool = True
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Register a function of (views, ..., rows, ...) as an operator, which compiled code calls.

    result: an empty tensor like the one that the function returns, from the operator's arguments.
    changes: whether the function writes to the pages.
    """

    def register(function: Callable[P, R]) -> Callable[P, R]:
        eager: Callable[..., Any] = function
        wanted, hints = inspect.signature(function).parameters, typing.get_type_hints(function)
        rows_kind = hints["rows"]
        fields = typing.get_type_hints(rows_kind)
        plain: dict[str, inspect.Parameter] = {}

        def add(name: str, kind: Any, default: Any = inspect.Parameter.empty) -> None:
            by = inspect.Parameter.POSITIONAL_OR_KEYWORD  # torch takes no keyword-only tensors
            plain[name] = inspect.Parameter(name, by, default=default, annotation=kind)

        for name, parameter in wanted.items():
            if name == "views":
                add("pages", torch.Tensor)
                add("layout", str)
            elif name == "config":
                add("config", str)
            elif name == "rows":
                for field, kind in fields.items():
                    add(field, kind)
            else:
                add(name, hints[name], parameter.default)

        def run(*args: Any, **kwargs: Any) -> Any:
            given = dict(zip(plain, args, strict=False)) | kwargs
            layout = StateLayout.from_text(given.pop("layout"))
            views = layout.views(given.pop("pages"))
            rows = rows_kind(**{field: given.pop(field) for field in fields})
            if "config" in given:
                given["config"] = _config(given["config"])
            y = eager(views=views, rows=rows, **given)
            return y if y is None else y.contiguous()  # as ``result`` promises

        def fake(*args: Any, **kwargs: Any) -> Any:
            return result(dict(zip(plain, args, strict=False)) | kwargs)

        gives = None if hints["return"] is type(None) else hints["return"]
        signature = inspect.Signature([*plain.values()], return_annotation=gives)
        run.__signature__ = signature  # type: ignore[attr-defined]
        run.__name__ = name = function.__name__
        written = ("pages",) if changes else ()
        schema = torch.library.infer_schema(run, mutates_args=written)
        LIBRARY.define(name + schema, tags=torch.Tag.pt2_compliant_tag)
        LIBRARY.impl(name, run, "CompositeExplicitAutograd")
        torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=LIBRARY)
        registered = getattr(getattr(torch.ops, NAMESPACE), name).default

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            if not torch.compiler.is_compiling():
                return function(*args, **kwargs)
            given: dict[str, Any] = {**dict(zip(wanted, args, strict=False)), **kwargs}
            flat: dict[str, Any] = {}
            for name, value in given.items():
                if name == "views":
                    flat |= {"pages": _pages(value), "layout": value.layout.text}
                elif name == "config":
                    flat["config"] = value.text
                elif name == "rows":
                    flat |= {field: getattr(value, field) for field in fields}
                else:
                    flat[name] = value
            with torch.no_grad():  # there is no backward
                return registered(**flat)

        return call

    return register
