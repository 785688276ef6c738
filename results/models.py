"""Types of pydantic, which is never imported here: whoever uses one of them has imported it."""

from __future__ import annotations

import sys
from typing import Any, get_args


def adapter(model: Any) -> Any:
    """Return pydantic's TypeAdapter of a type that has types of pydantic in it, such as `list[Model]` or `Model | None`, or
    the TypeAdapter that is given. None for a model itself, and for other types: msgspec decodes them."""
    kind = getattr(sys.modules.get("pydantic"), "TypeAdapter", None)
    if kind is None or hasattr(model, "model_validate_json"):
        return None
    if isinstance(model, kind):
        return model
    return kind(model) if _has_pydantic(model) else None


def _has_pydantic(model: Any) -> bool:
    """Also for what annotates a type, such as pydantic's Field."""
    is_own = str(getattr(model, "__module__", None)).partition(".")[0] == "pydantic"
    return is_own or hasattr(model, "__pydantic_core_schema__") or any(map(_has_pydantic, get_args(model)))
