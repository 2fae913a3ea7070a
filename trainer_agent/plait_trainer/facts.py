"""Training facts as a version record can hold them: what training code has at hand, as JSON."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from plait.errors import DocumentInvalid, UsageError
from plait.version_record import check_metadata


def facts_of(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Metadata of a publish, checked.

    Numbers of numpy and tensors of one element become Python's numbers. JSON has no number that
    isn't finite, and a loss that is must not end a training: it is kept as text, "nan" or "inf".

    Raises:
        UsageError: not a mapping from text.
        DocumentInvalid: a value, named by its key, that JSON can't hold.
        LimitExceeded: too many bytes, or too deeply nested for a record.
    """
    if not isinstance(metadata, Mapping):
        raise UsageError(f"metadata is a {type(metadata).__name__}; expected name → value")
    facts = {}
    for key, value in metadata.items():
        if not isinstance(key, str):
            raise UsageError(f"metadata names a value {key!r}; expected text")
        facts[key] = _plain(value)
        try:
            check_metadata({key: facts[key]})
        except DocumentInvalid as error:
            raise DocumentInvalid(
                f"metadata {key!r}: {error.message}",
                remedy="pass numbers, text, truth values, or lists and mappings of them",
            ) from error
    return check_metadata(facts)


def _plain(value: object) -> object:
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.detach().item()
    elif isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value
