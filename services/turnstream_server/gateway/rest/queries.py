"""Refuses query parameters that a route does not read."""

from __future__ import annotations

import difflib

from fastapi import Request
from fastapi.dependencies.models import Dependant
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute


async def refuse_unknown_query(request: Request) -> None:
    """Raise RequestValidationError for a query parameter that the route has not declared.

    A filter with a typing error would otherwise be ignored.
    """
    route = request.scope["route"]
    assert isinstance(route, APIRoute)
    known = _names(route.dependant)
    for name in request.query_params:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1) or sorted(known)
            names = f"known: {', '.join(near)}" if near else "this route has none"
            problem = {
                "type": "extra_forbidden",
                "loc": ("query", name),
                "msg": f"it is no query parameter of this route; {names}",
                "input": request.query_params[name],
            }
            raise RequestValidationError([problem])


def _names(dependant: Dependant) -> list[str]:
    """Return the query parameters of a route and of its dependencies."""
    own = [each.alias for each in dependant.query_params]
    return own + [name for each in dependant.dependencies for name in _names(each)]
