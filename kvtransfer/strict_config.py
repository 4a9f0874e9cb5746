"""What every section of a configuration has in common (pure)."""

from typing import Any

from pydantic import BaseModel, ConfigDict


def _unwrapped(schema: dict[str, Any]) -> None:
    """Join the lines of the descriptions in a JSON schema: the docstrings below the fields are wrapped."""
    for field in schema.get("properties", {}).values():
        if "description" in field:
            field["description"] = " ".join(field["description"].split())


class StrictConfig(BaseModel):
    """Immutable; refuses fields that it does not know, infinities and NaN. A field's docstring is its description."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True, json_schema_extra=_unwrapped
    )
