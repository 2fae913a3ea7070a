"""The API's description: what FastAPI makes of the routes, and the problems that any may answer."""

from typing import Any, Final

from fastapi import FastAPI

from plait.wire.problem import MEDIA_TYPE, Problem

_PROBLEM: Final = {"content": {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}}}
_REFUSED: Final = {"description": "Refused: `code` says why, `remedy` what to do", **_PROBLEM}
_FAILED: Final = {"description": "Failed: `retryable` says whether to ask again", **_PROBLEM}

# FastAPI's own idea of a refusal, which this registry never sends.
_VALIDATION: Final = ("HTTPValidationError", "ValidationError")


def describe(app: FastAPI) -> None:
    """Makes `app.openapi()` name the problem document for every operation."""
    of_routes = app.openapi

    def described() -> dict[str, Any]:
        if app.openapi_schema is None:
            found = of_routes()
            schemas = found.setdefault("components", {}).setdefault("schemas", {})
            for name in _VALIDATION:
                schemas.pop(name, None)
            schemas["Problem"] = Problem.model_json_schema()
            for path in found["paths"].values():
                for operation in path.values():
                    operation["responses"].pop("422", None)
                    operation["responses"] |= {"4XX": _REFUSED, "5XX": _FAILED}
            app.openapi_schema = found
        return app.openapi_schema

    app.openapi = described  # type: ignore[method-assign]
