"""The base class of every section of a configuration (pure)."""

from typing import Any

from pydantic import BaseModel, ConfigDict


def _join_lines(schema: dict[str, Any]) -> None:
    """Join the lines of each description in a JSON schema, since docstrings are wrapped."""
    for field in schema.get("properties", {}).values():
        if "description" in field:
            field["description"] = " ".join(field["description"].split())


class StrictConfig(BaseModel):
    """Immutable. Refuses unknown fields, infinities and NaN. The docstring below a field is its description."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True, json_schema_extra=_join_lines
    )
