"""The paths. Nothing can be changed here: every request is a GET without a body.

path           answer                                    who
-------------  ----------------------------------------  ------------------------------
/              the page itself, which holds no figures   anybody
/enter         the key becomes a cookie                  a key
/live          all that the page shows, as it changes    a key or its cookie
/state.json    the same once, for programs               a key or its cookie
/metrics       for Prometheus                            the same, but of no peer

A proxy may give all of them a prefix, and keep it or take it off: only what is behind the last
slash counts. HEAD is answered as GET, without a body; OPTIONS with the methods that there are.

A key comes as `Authorization: Bearer KEY`. In a link it stands behind the `#`, which browsers send
to nobody; the page hands it in once and takes it out of the address. Each answer closes its
connection: a connection is one request, which is what the front counts.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from importlib import resources

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ....net.identity.names import Party, PartyRole
from ..shell import RejectedError
from .keys import PageKeys
from .metrics import CONTENT_TYPE, Metrics
from .seen import EVERY_S, Watcher

__all__ = ["page_app"]

_RATE = 200_000
"""Most bytes per second that one who looks gets of /live."""
_QUIET_S = 15.0
"""After which /live says that it is still there: proxies end connections that are silent."""

Endpoint = Callable[[Request], Awaitable[Response]]


def page_app(watcher: Watcher, metrics: Metrics, keys: PageKeys, cookie: str) -> Starlette:
    """`cookie`: its name, another one for each broker: browsers do not tell ports apart."""
    html, policy = _html()

    def may(request: Request) -> tuple[Party, int] | None:
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            key = request.cookies.get(cookie, "")
        return keys.check(key.strip(), time.time()) if key else None

    def viewer(request: Request) -> Party:
        found = may(request)
        assert found is not None, "it is guarded"
        return found[0]

    def guarded(answer: Endpoint) -> Endpoint:
        async def asked(request: Request) -> Response:
            if may(request) is None:
                return PlainTextResponse(
                    "A key is needed, and none came that still opens this page. `shoal page` "
                    "prints a link with one; Prometheus sends it as a bearer token.\n",
                    401,
                    {"WWW-Authenticate": 'Bearer realm="shoal"'},
                )
            try:
                return await answer(request)
            except RejectedError as error:
                return PlainTextResponse(f"{error}\n", 503)

        return asked

    async def page(request: Request) -> Response:
        return Response(html, media_type="text/html", headers={"Content-Security-Policy": policy})

    async def enter(request: Request) -> Response:
        found = may(request)
        assert found is not None, "it is guarded"
        key = request.headers.get("authorization", "").partition(" ")[2].strip()
        answer = Response(status_code=204)
        if key:
            answer.set_cookie(
                cookie,
                key,
                max_age=max(1, int(found[1] - time.time())),
                secure=request.url.scheme == "https",
                httponly=True,
                samesite="strict",
            )
        return answer

    async def live(request: Request) -> Response:
        if request.method == "HEAD":  # it would have no end
            return Response(media_type="text/event-stream")
        return StreamingResponse(
            _stream(watcher, viewer(request), lambda: may(request) is not None),
            media_type="text/event-stream",
            headers={"X-Accel-Buffering": "no"},
        )

    async def state(request: Request) -> Response:
        seen = await watcher.look()
        return Response(seen.text(viewer(request)), media_type="application/json")

    async def scrape(request: Request) -> Response:
        if viewer(request).role is PartyRole.PEER:
            return PlainTextResponse("A peer's key opens no metrics: they are of all.\n", 403)
        text = metrics.text(await watcher.look(), viewer(request))
        return Response(text, headers={"Content-Type": CONTENT_TYPE})

    routes = [Route("/", page, methods=["GET"])]
    for path, answer in (
        ("/enter", enter),
        ("/live", live),
        ("/state.json", state),
        ("/metrics", scrape),
    ):
        routes.append(Route(path, guarded(answer), methods=["GET"]))
    app = Starlette(routes=routes)
    app.add_middleware(_Headers)
    return app


async def _stream(watcher: Watcher, viewer: Party, still: Callable[[], bool]) -> AsyncIterator[str]:
    """Server-sent events: the state whenever it is another one, until the key ends."""
    loop = asyncio.get_running_loop()
    last, said_at = "", loop.time()
    while still():
        try:
            text = (await watcher.look()).text(viewer)
        except RejectedError:
            return
        if text != last:
            yield f"data: {text}\n\n"
            last, said_at = text, loop.time()
        elif loop.time() - said_at > _QUIET_S:
            yield ": still here\n\n"
            said_at = loop.time()
        await asyncio.sleep(max(EVERY_S, len(text) / _RATE))


class _Headers:
    """On every answer."""

    ALWAYS = (
        (b"connection", b"close"),
        (b"cache-control", b"no-store"),
        (b"x-content-type-options", b"nosniff"),
        (b"referrer-policy", b"no-referrer"),
        (b"x-frame-options", b"DENY"),
        (b"cross-origin-resource-policy", b"same-origin"),
    )

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def sends(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], *self.ALWAYS]}
            await send(message)

        if scope.get("method") == "OPTIONS":
            allowed = Response(status_code=204, headers={"Allow": "GET, HEAD, OPTIONS"})
            await allowed(scope, receive, sends)
            return
        await self._app({**scope, "path": self._path(scope), "root_path": ""}, receive, sends)

    def _path(self, scope: Scope) -> str:
        """Without the prefix of a proxy."""
        given = dict(scope["headers"]).get(b"x-forwarded-prefix", b"").decode("latin-1")
        path = str(scope["path"])
        if given.strip("/") and path.strip("/") == given.strip("/"):
            return "/"
        return "/" + path.rpartition("/")[2]


def _html() -> tuple[str, str]:
    """The page with its style and its script inside, and a policy that runs these two alone."""
    parts = resources.files(__package__)
    style, script = (parts.joinpath(n).read_text("utf-8") for n in ("page.css", "page.js"))
    html = parts.joinpath("page.html").read_text("utf-8")
    html = html.replace("/*STYLE*/", style).replace("/*SCRIPT*/", script)
    policy = (
        f"default-src 'none'; style-src 'sha256-{_hash(style)}'; script-src "
        f"'sha256-{_hash(script)}'; connect-src 'self'; img-src data:; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'none'"
    )
    return html, policy


def _hash(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
