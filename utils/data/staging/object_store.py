"""An object store: its objects listed and read in ranges, with patience where it does not answer.

Credentials, endpoint and region come from the variables of the environment that obstore reads: AWS_ACCESS_KEY_ID,
AWS_SECRET_ACCESS_KEY, AWS_ENDPOINT_URL, AWS_REGION, GOOGLE_APPLICATION_CREDENTIALS and so on.
"""

import random
import re
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

from utils.data.formats.naming import is_hidden
from utils.data.staging.staged_files import StoredObject
from utils.errors import UserError, first_line
from utils.options.store_url import split_url

FIRST_ANSWER_SECONDS = 30.0  # for a store that has not answered yet: its address may be wrong
OUTAGE_SECONDS = 300.0  # for one that has: it may come back
NOTE_SECONDS = 5.0  # of an outage, until a line says so
FIRST_DELAY, MAX_DELAY = 0.25, 15.0  # seconds between two tries
CONNECT_SECONDS, READ_SECONDS, REQUEST_SECONDS = 10, 30, 600
CHUNK_BYTES = 1 << 20  # that are written at a time
_CREDENTIALS = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_SKIP_SIGNATURE=true for a public bucket",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS, or GOOGLE_SKIP_SIGNATURE=true for a public bucket",
}
_METADATA = ("/latest/api/token", "/computeMetadata/", "service account", "application credentials")
_CAUSE = re.compile(r'(?:message|error): "([^"]+)"')
_CODE = re.compile(r"<Code>(\w+)</Code>")
_STATUS = re.compile(r"status code: (\d{3})")
T = TypeVar("T")


class Canceled(Exception):
    """The program has stopped waiting for the store."""


class Outage:
    """How long a store has not answered any thread, and how long a thread waits before it tries again.

    Args:
        url: of the data set, for messages.
        note: prints a line for the user.

    Attributes:
        canceled: set when nobody waits for the store any more.
    """

    def __init__(self, url: str, note: Callable[[str], None]) -> None:
        self.canceled = threading.Event()
        self.has_answered = False
        self._url, self._note = url, note
        self._lock = threading.Lock()
        self._answered_at = time.monotonic()
        self._is_noted = False

    def end(self) -> None:
        """The store has answered."""
        with self._lock:
            self.has_answered, self._answered_at = True, time.monotonic()
            if self._is_noted:
                self._is_noted = False
                self._note(f"{self._url}: the store answers again")

    def wait(self, reason: str, attempt: int) -> None:
        """The store has not answered, for the `attempt`-th time in a row: wait before the next try.

        Raises:
            UserError: it has not answered for too long.
            Canceled: nobody waits any more.
        """
        with self._lock:
            limit = OUTAGE_SECONDS if self.has_answered else FIRST_ANSWER_SECONDS
            silence = time.monotonic() - self._answered_at
            if silence > limit:
                what = "does not answer any more" if self.has_answered else "does not answer"
                raise UserError(
                    f"{self._url}: the store {what}, {limit:g} s long ({reason}); check endpoint and network, the same "
                    "command goes on from there"
                )
            if silence > NOTE_SECONDS and not self._is_noted:
                self._is_noted = True
                self._note(f"{self._url}: the store does not answer ({reason}); trying again for {limit:g} s")
        delay = min(MAX_DELAY, FIRST_DELAY * 2 ** min(attempt, 16)) * random.Random().uniform(0.5, 1)
        if self.canceled.wait(delay):
            raise Canceled


class ObjectStore:
    """The objects below a URL.

    Args:
        url: `s3://BUCKET/PREFIX` or `gs://BUCKET/PREFIX`.
        outage: counts the tries of all threads.

    Raises:
        UserError: a variable of the environment has a value that cannot be.
    """

    def __init__(self, url: str, outage: Outage) -> None:
        import obstore  # an extra
        from obstore import exceptions
        from obstore.store import from_url

        self._obstore, self._errors = obstore, exceptions
        self._url, self._outage = url, outage
        self._scheme, bucket, self._prefix = split_url(url)
        client: Any = {
            "allow_http": True,  # where the endpoint says http://
            "connect_timeout": timedelta(seconds=CONNECT_SECONDS),
            "read_timeout": timedelta(seconds=READ_SECONDS),
            "timeout": timedelta(seconds=REQUEST_SECONDS),
        }
        try:
            retries: Any = {"max_retries": 0}  # `Outage` counts them for all threads
            self._store: Any = from_url(f"{self._scheme}://{bucket}", client_options=client, retry_config=retries)
        except (exceptions.BaseError, ValueError) as error:
            raise UserError(f"{url}: {_reason(error)}; check the variables of the environment") from None

    def list_objects(self) -> list[StoredObject]:
        """All objects below the URL, by name, but for hidden ones, folders and indexes of shards.

        Raises:
            UserError: there are none, or the store refuses.
            Canceled: nobody waits any more.
        """
        found = self._call("the bucket", self._list)
        if not found:
            raise UserError(f"{self._url}: no object below it; check bucket and prefix")
        folders = {name[:at] for name, *_ in found for at, letter in enumerate(name) if letter == "/"}
        return sorted(each for each in found if each.size or each.name not in folders)  # not what stands for a folder

    def _list(self) -> list[StoredObject]:
        start = len(self._prefix) + 1 if self._prefix else 0
        found = []
        for chunk in self._obstore.list(self._store, prefix=self._prefix or None, chunk_size=1000):
            self._outage.end()
            if self._outage.canceled.is_set():
                raise Canceled
            for meta in chunk:
                name = meta["path"][start:]
                if name and not _is_excluded(name):
                    changed = meta["last_modified"]
                    tag = (meta["e_tag"] or changed.isoformat()).strip('"')
                    found.append(StoredObject(name, meta["size"], tag, int(changed.timestamp() * 1e6) * 1000))
        return found

    def read(self, found: StoredObject, start: int, end: int, write: Callable[[Any, int], None]) -> str:
        """Read the bytes from `start` to `end` of an object; goes on at the last byte after an outage.

        Args:
            found: as it was listed.
            start, end: in bytes.
            write: gets bytes and their offset, in order.

        Returns:
            The version of the object; "" if the store counts none.

        Raises:
            UserError: the object has changed or vanished, or the store refuses.
            Canceled: nobody waits any more.
        """
        at, version = start, ""

        def go_on() -> None:
            nonlocal at, version
            options = {"range": (at, end)} | ({"if_match": f'"{found.tag}"'} if self._scheme == "s3" else {})
            result = self._obstore.get(self._store, self._key(found.name), options=options)
            meta = result.meta
            if (meta["e_tag"] or found.tag).strip('"') != found.tag or meta["size"] != found.size:
                raise self._errors.PreconditionError
            version = meta["version"] or ""
            for chunk in result.stream(min_chunk_size=CHUNK_BYTES):
                if self._outage.canceled.is_set():
                    raise Canceled
                self._outage.end()
                write(chunk, at)
                at += len(chunk)
            if at < end:
                raise ConnectionError(f"{end - at:,} bytes are missing")

        self._call(found.name, go_on, lambda: at)
        return version

    def _key(self, name: str) -> str:
        return f"{self._prefix}/{name}" if self._prefix else name

    def _call(self, what: str, call: Callable[[], T], progress: Callable[[], int] = lambda: 0) -> T:
        """The result of `call`, which is repeated while the store does not answer; `progress` starts a new count."""
        attempt, before = 0, progress()
        while True:
            try:
                result = call()
                self._outage.end()
                return result
            except (self._errors.NotFoundError, FileNotFoundError):
                raise UserError(self._missing(what)) from None
            except (self._errors.PermissionDeniedError, self._errors.UnauthenticatedError, PermissionError) as error:
                raise UserError(self._denied(f"access to {what} is denied ({_reason(error)})")) from None
            except self._errors.PreconditionError:
                raise UserError(
                    f"{self._url}/{what}: has changed while it was copied; the same command copies the new one, once "
                    "the upload has ended"
                ) from None
            except (self._errors.BaseError, ConnectionError, TimeoutError) as error:
                self._refuse_lasting(what, error)
                attempt = 0 if progress() > before else attempt
                before = progress()
                self._outage.wait(_reason(error), attempt)
                attempt += 1

    def _refuse_lasting(self, what: str, error: Exception) -> None:
        """Raise UserError for an error that another try would meet again."""
        text = str(error)
        if not self._outage.has_answered and any(word in text for word in _METADATA):
            raise UserError(self._denied(f"no credentials ({_reason(error)})")) from None
        found = _STATUS.search(text)
        status = found[1] if found else ""
        if status == "404":
            raise UserError(self._missing(what)) from None
        if status in ("401", "403"):
            raise UserError(self._denied(f"access to {what} is denied ({_reason(error)})")) from None
        if "invalid path" in text:
            raise UserError(
                f"{self._url}: an object has no name of a file ({_reason(error)}); rename it, or give another prefix"
            ) from None
        if (status[:1] in ("3", "4") and status not in ("408", "429")) or isinstance(
            error, self._errors.InvalidPathError | self._errors.NotSupportedError
        ):
            raise UserError(
                f"{self._url}: the store refuses ({_reason(error)}); check bucket, region and endpoint"
            ) from None

    def _missing(self, what: str) -> str:
        if what == "the bucket":
            return f"{self._url}: no such bucket; check its name, and the endpoint"
        return f"{self._url}/{what}: has vanished while it was copied; start again once the data set is complete"

    def _denied(self, what: str) -> str:
        return f"{self._url}: {what}; set {_CREDENTIALS[self._scheme]}"


def _is_excluded(name: str) -> bool:
    # Brisk makes the index anew, as the times of the staged shards are others.
    # A name with an empty part or with `..` could lead out of the folder.
    return name.endswith(".index.npz") or any(not part or is_hidden(part) for part in name.split("/"))


def _reason(error: Exception) -> str:
    """Why a request failed, in a few words: obstore's errors have a page of details."""
    text = str(error)
    if found := _CAUSE.findall(text.partition("Debug source:")[2]):
        return str(found[-1])[:120]
    line = re.sub(
        r"Generic \w+ error: |Error performing [\w ]+: |Error performing \w+ \S+ in \S+ - ", "", first_line(error)
    )
    code = _CODE.search(text)
    return line.partition("<")[0].rstrip(": ")[:160] + (f", {code[1]}" if code else "")
