"""For whoever runs the server: /health, /ready, /metrics, and the chat page at /."""

from __future__ import annotations

from importlib import resources

from fastapi import APIRouter
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response

from shoal.server.routing import TheService

router = APIRouter()

# The page may run its own script and ask its own server, nothing else.
_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


@router.get("/health")
async def health(service: TheService) -> Response:
    """Alive: 200 until the engine has stopped."""
    status = "ok" if service.dead is None else "dead"
    return JSONResponse({"status": status}, 200 if service.dead is None else 500)


@router.get("/ready")
async def ready(service: TheService) -> Response:
    """200 if a token was generated within the last seconds, or one can be now."""
    is_ready = await service.is_ready()
    return JSONResponse({"status": "ready" if is_ready else "not ready"}, 200 if is_ready else 503)


@router.get("/metrics", response_class=PlainTextResponse)
async def metrics(service: TheService) -> Response:
    return Response(service.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


@router.get("/", include_in_schema=False)
async def page() -> Response:
    text = resources.files("shoal.server").joinpath("page.html").read_text("utf-8")
    return HTMLResponse(text, headers={"content-security-policy": _POLICY})
