"""What a section of the configuration is, and a key of it."""

from __future__ import annotations

from typing import Annotated, Any, TypeAlias, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

T = TypeVar("T")
Word: TypeAlias = Annotated[str, Field(min_length=1)]
Positive: TypeAlias = Annotated[int, Field(ge=1)]
Fraction: TypeAlias = Annotated[float, Field(ge=0.0, le=1.0)]
Seconds: TypeAlias = Annotated[float, Field(gt=0.0, le=86400.0)]


def key(default: T, meaning: str, **limits: Any) -> T:
    """A key of a section. `limits` are those of pydantic's `Field`."""
    field: T = Field(default=default, description=meaning, **limits)
    return field


class Section(BaseModel):
    """A group of keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)

    @field_validator("*", mode="before")
    @classmethod
    def _true_is_no_number(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse true for a number and 1 for a boolean, which pydantic would accept."""
        wants_bool = cls.model_fields[info.field_name or ""].annotation in (bool, bool | None)
        if isinstance(value, (int, float)) and isinstance(value, bool) != wants_bool:
            raise ValueError("should be true or false" if wants_bool else "should not be true or false")
        return value
