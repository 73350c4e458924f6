"""A real S3 protocol server on loopback, in the weather that a test asks for."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

Application = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]


class Weather:
    """What stands between the client and the server: refusals, slowness, and a count of requests."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.calm_down()

    def calm_down(self) -> None:
        """Fine weather, nothing counted."""
        self.refuse_next = 0
        self.drop_next = 0
        self.refuse_if: Callable[[str, str], bool] = lambda method, path: False
        self.pause_s = 0.0
        self.uploading = self.most_uploading = 0  # parts on their way at once, now and at most
        self.requests: list[tuple[str, str, str]] = []

    def wrap(self, application: Application) -> Application:
        """The application, in this weather."""

        def answer(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
            method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"]
            with self._lock:
                self.requests.append((method, path, environ.get("HTTP_RANGE", "")))
                refused = self.refuse_next > 0 or self.refuse_if(method, path)
                self.refuse_next -= refused and self.refuse_next > 0
                dropped = self.drop_next > 0
                self.drop_next -= dropped
            if dropped:
                environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
            is_part = method == "PUT" and "partNumber" in environ["QUERY_STRING"]
            with self._lock:
                self.uploading += is_part
                self.most_uploading = max(self.most_uploading, self.uploading)
            time.sleep(self.pause_s)
            with self._lock:
                self.uploading -= is_part
            if refused:
                environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
                start_response("503 Slow Down", [("Content-Type", "application/xml")])
                return [b"<Error><Code>SlowDown</Code><Message>Reduce your request rate.</Message></Error>"]
            return application(environ, start_response)

        return answer


@contextmanager
def s3_server(weather: Weather) -> Iterator[str]:
    """The end point of a server with one bucket, called "bucket"."""
    from moto.moto_api._internal import moto_api_backend
    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    logging.getLogger("werkzeug").setLevel(logging.WARNING)  # else a line for every request
    moto_api_backend.reset()  # of the whole process: the buckets of an earlier server
    application = weather.wrap(DomainDispatcherApplication(create_backend_app))
    running = make_server("127.0.0.1", 0, application, threaded=True)
    poll_s = 0.05  # how long the end of the server takes
    threading.Thread(target=running.serve_forever, args=(poll_s,), daemon=True).start()
    endpoint = f"http://127.0.0.1:{running.server_port}"
    bucket_client(endpoint).create_bucket(Bucket="bucket")
    yield endpoint
    running.shutdown()


def bucket_client(endpoint: str) -> Any:
    """A client of the server's own protocol, not through what is tested."""
    import boto3

    keys = {"aws_access_key_id": "any", "aws_secret_access_key": "any"}
    return boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1", **keys)
