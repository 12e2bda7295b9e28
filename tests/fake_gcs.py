"""A stand-in for Google Cloud Storage on this machine: objects in memory behind its JSON API.

It answers the few requests that TensorStore and gcsfs make: reads with ranges, conditional writes, deletions, listings
in pages.

    TENSORSTORE_GCS_HTTP_URL and STORAGE_EMULATOR_HOST name its address; nothing else tells it from the service.
"""

from __future__ import annotations

import contextlib
import http.server
import json
import re
import threading
import urllib.parse
from collections.abc import Iterator

PAGE = 100  # names in one answer to a listing: a conversion of some size needs several


class Bucket:
  """Objects by name, each with its generation; every write has a new one."""

  def __init__(self) -> None:
    self.lock, self.objects, self.last_generation = threading.Lock(), {}, 0
    self.writes: list[str] = []
    self.refuse_writes_after: int | None = None  # as a bucket that is out of quota, or out of reach

  def write(self, name: str, data: bytes) -> int:
    self.last_generation += 1
    self.objects[name] = (self.last_generation, data)
    self.writes.append(name)
    return self.last_generation


class _Handler(http.server.BaseHTTPRequestHandler):
  protocol_version = "HTTP/1.1"
  disable_nagle_algorithm = True  # or each answer waits 40 ms for an acknowledgement
  wbufsize = -1
  bucket: Bucket

  def log_message(self, *_) -> None:
    pass

  def _answer(self, code: int, body: bytes = b"", headers: dict[str, str] | None = None) -> None:
    self.send_response(code)
    for name, value in (headers or {}).items():
      self.send_header(name, value)
    self.send_header("Content-Length", str(len(body)))
    self.end_headers()
    if self.command != "HEAD":
      self.wfile.write(body)
    self.wfile.flush()

  def _json(self, value) -> None:
    self._answer(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

  def _request(self) -> tuple[str | None, dict[str, str]]:
    """The object's name, None for the bucket itself, and the parameters."""
    url = urllib.parse.urlsplit(self.path)
    query = dict(urllib.parse.parse_qsl(url.query))
    match = re.fullmatch(r"/(?:upload/|download/)?storage/v1/b/[^/]+/o/?(.*)", url.path)
    return (urllib.parse.unquote(match[1]) or None) if match else None, query

  def _described(self, name: str) -> dict[str, str]:
    generation, data = self.bucket.objects[name]
    time = "2026-01-01T00:00:00.000Z"
    return {
        "kind": "storage#object", "name": name, "bucket": "fake", "size": str(len(data)), "generation": str(generation),
        "updated": time, "timeCreated": time,
    }  # fmt: skip

  def _holds(self, name: str, query: dict[str, str]) -> bool:
    wanted = query.get("ifGenerationMatch")
    return wanted is None or int(wanted) == self.bucket.objects.get(name, (0, b""))[0]

  def do_GET(self) -> None:
    name, query = self._request()
    with self.bucket.lock:
      if name is None:
        self._json(self._listing(query))
      elif name not in self.bucket.objects:
        self._answer(404, b"no such object")
      elif query.get("ifGenerationNotMatch") == str(self.bucket.objects[name][0]):
        self._answer(304)
      elif not self._holds(name, query):
        self._answer(412)
      elif query.get("alt") == "media":
        self._media(name)
      else:
        self._json(self._described(name))

  def _media(self, name: str) -> None:
    generation, data = self.bucket.objects[name]
    headers = {"x-goog-generation": str(generation), "Content-Type": "application/octet-stream"}
    match = re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range", ""))
    if not match:
      self._answer(200, data, headers)
      return
    if match[1]:
      start, stop = int(match[1]), min(len(data), int(match[2]) + 1 if match[2] else len(data))
    else:
      start, stop = max(0, len(data) - int(match[2])), len(data)
    if start >= len(data):
      self._answer(416)
      return
    self._answer(206, data[start:stop], headers | {"Content-Range": f"bytes {start}-{stop - 1}/{len(data)}"})

  def _listing(self, query: dict[str, str]) -> dict:
    prefix, delimiter = query.get("prefix", ""), query.get("delimiter")
    names = sorted(name for name in self.bucket.objects if name.startswith(prefix))
    names = [name for name in names if name >= query.get("startOffset", "")]
    names = [name for name in names if "endOffset" not in query or name < query["endOffset"]]
    directories: list[str] = []
    if delimiter:
      below = [name for name in names if delimiter in name[len(prefix) :]]
      directories = sorted({name[: name.index(delimiter, len(prefix)) + 1] for name in below})
      names = [name for name in names if name not in set(below)]
    start = int(query.get("pageToken", 0))
    answer: dict = {"kind": "storage#objects", "items": [self._described(n) for n in names[start : start + PAGE]]}
    if directories and not start:
      answer["prefixes"] = directories
    if start + PAGE < len(names):
      answer["nextPageToken"] = str(start + PAGE)
    return answer

  def do_POST(self) -> None:
    _, query = self._request()
    data, name = self.rfile.read(int(self.headers["Content-Length"])), query["name"]
    with self.bucket.lock:
      limit = self.bucket.refuse_writes_after
      if limit is not None and len(self.bucket.writes) >= limit:
        self._answer(403, b"quota")
      elif not self._holds(name, query):
        self._answer(412)
      else:
        self.bucket.write(name, data)
        self._json(self._described(name))

  def do_DELETE(self) -> None:
    name, query = self._request()
    with self.bucket.lock:
      if name is None or name not in self.bucket.objects:
        self._answer(404)
      elif not self._holds(name, query):
        self._answer(412)
      else:
        del self.bucket.objects[name]
        self._answer(204)


@contextlib.contextmanager
def serve() -> Iterator[tuple[str, Bucket]]:
  """Yields the address of a new, empty bucket of any name, and the bucket itself."""
  bucket = Bucket()
  server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"bucket": bucket}))
  thread = threading.Thread(target=server.serve_forever, daemon=True)
  thread.start()
  try:
    yield f"http://127.0.0.1:{server.server_address[1]}", bucket
  finally:
    server.shutdown()
    server.server_close()
    thread.join()
