"""The API's description: what FastAPI makes of the routes, and the problems that any may answer."""

from typing import Any, Final

from fastapi import FastAPI

from plait.wire import CommitRequest, MissingRequest
from plait.wire.problem import MEDIA_TYPE, Problem

_PROBLEM: Final = {"content": {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}}}
_REFUSED: Final = {"description": "Refused: `code` says why, `remedy` what to do", **_PROBLEM}
_FAILED: Final = {"description": "Failed: `retryable` says whether to ask again", **_PROBLEM}

# Bodies that are too large for FastAPI to read, so that it knows nothing of them.
_READ_BY_ROUTES: Final = (CommitRequest, MissingRequest)

# FastAPI's own idea of a refusal, which this registry never sends.
_VALIDATION: Final = ("HTTPValidationError", "ValidationError")


def describe(app: FastAPI) -> None:
    """Makes `app.openapi()` name the problem document for every operation."""
    of_routes = app.openapi

    def described() -> dict[str, Any]:
        if app.openapi_schema is None:
            found = of_routes()
            schemas = found.setdefault("components", {}).setdefault("schemas", {})
            for schema in _VALIDATION:
                schemas.pop(schema, None)
            for model in _READ_BY_ROUTES:
                schemas[model.__name__] = model.model_json_schema()
            schemas["Problem"] = Problem.model_json_schema()
            found["components"]["securitySchemes"] = {
                "token": {
                    "type": "http",
                    "scheme": "bearer",
                    "description": "Where the registry was started with PLAIT_TOKEN",
                }
            }
            for name, path in found["paths"].items():
                guarded = name.startswith("/v1/")
                for operation in path.values():
                    operation["security"] = [{"token": []}, {}] if guarded else []
                    operation["responses"].pop("422", None)
                    operation["responses"] |= {"4XX": _REFUSED, "5XX": _FAILED}
            app.openapi_schema = found
        return app.openapi_schema

    app.openapi = described  # type: ignore[method-assign]
