"""What every document on the wire shares: frozen, and strict about types."""

from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from plait.errors import UsageError
from plait.limits import ACTOR_BYTES_MAX, INTEGER_MAX, NAME_BYTES_MAX


class WireDocument(BaseModel):
    """Frozen. Readers ignore fields they don't know, so that a newer side may add some."""

    model_config = ConfigDict(frozen=True, strict=True, extra="ignore")


class WireRequest(WireDocument):
    """A request body: an unknown field is a mistake of the caller's and is refused."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    @classmethod
    def of(cls, **fields: Any) -> Self:
        """A request made of what somebody asked for.

        Raises:
            UsageError: naming every field that breaks a rule.
        """
        try:
            return cls(**fields)
        except ValidationError as error:
            wrong = (f"{_place(each['loc'])}: {each['msg']}" for each in error.errors())
            raise UsageError(f"{cls.__name__} can't be sent: {'; '.join(wrong)}"[:500]) from error


def _place(location: tuple[int | str, ...]) -> str:
    return ".".join(map(str, location))


Digest = Annotated[str, StringConstraints(pattern=r"^sha256:[0-9a-f]{64}$")]
FingerprintHex = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{32}$")]
# The full rule, which also keeps names and numbers apart, is plait.manifest.check_name.
Name = Annotated[
    str,
    StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=NAME_BYTES_MAX),
]
# Databases can't hold a NUL in a text.
Text = Annotated[str, StringConstraints(pattern=r"^[^\x00]*$")]
Actor = Annotated[Text, Field(max_length=ACTOR_BYTES_MAX)]
Seq = Annotated[int, Field(ge=1, le=INTEGER_MAX)]
Generation = Annotated[int, Field(ge=0, le=INTEGER_MAX)]
Count = Annotated[int, Field(ge=0, le=INTEGER_MAX)]
Time = Annotated[str, Field(description="RFC 3339, UTC", examples=["2026-01-31T12:00:00.000000Z"])]
