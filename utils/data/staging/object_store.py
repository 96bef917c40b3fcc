"""An object store: its objects listed and read in ranges. obstore tries again; this file knows when to give up.

Credentials, endpoint and region come from the variables of the environment that obstore reads: AWS_ACCESS_KEY_ID,
AWS_SECRET_ACCESS_KEY, AWS_ENDPOINT_URL, AWS_REGION, GOOGLE_APPLICATION_CREDENTIALS and so on.
"""

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
from utils.text import count

FIRST_ANSWER_SECONDS = 30.0  # for a store that has not answered yet: its address may be wrong
OUTAGE_SECONDS = 300.0  # for one that has: it may come back
PAUSE_SECONDS = 5.0  # between two rounds of obstore's tries; an outage that lasts longer gets a line
RETRIES = 2  # in a round; few, as a thread inside obstore notices no signal
READ_SECONDS, REQUEST_SECONDS = 30, 600  # of obstore itself: none, and 30, which a large range may exceed
CHUNK_BYTES = 1 << 20  # that are written at a time
THE_BUCKET = "the bucket"  # in messages
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
    """How long a store has not answered any thread.

    obstore counts the tries and seconds of one request, and says nothing before its last. A range that has taken its
    seconds is not tried again at all. A store that is down is one event for all requests, and gets one line.

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

    def wait(self, reason: str) -> None:
        """obstore has given up on a request: wait before the next round.

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
            if silence > PAUSE_SECONDS and not self._is_noted:
                self._is_noted = True
                self._note(f"{self._url}: the store does not answer ({reason}); trying again for {limit:g} s")
        if self.canceled.wait(PAUSE_SECONDS):
            raise Canceled


class ObjectStore:
    """The objects below a URL.

    Args:
        url: `s3://BUCKET/PREFIX` or `gs://BUCKET/PREFIX`.
        outage: of all threads.

    Raises:
        UserError: a variable of the environment has a value that cannot be.
    """

    def __init__(self, url: str, outage: Outage) -> None:
        import obstore  # an extra
        from obstore import exceptions
        from obstore.store import GCSStore, S3Store

        self._obstore, self._errors = obstore, exceptions
        self._url, self._outage = url, outage
        self._scheme, bucket, prefix = split_url(url)
        options: Any = {
            "client_options": {
                "allow_http": True,  # where the endpoint says http://
                "read_timeout": timedelta(seconds=READ_SECONDS),
                "timeout": timedelta(seconds=REQUEST_SECONDS),
            },
            "retry_config": {"max_retries": RETRIES, "retry_timeout": timedelta(seconds=FIRST_ANSWER_SECONDS)},
        }
        make: Any = {"s3": S3Store, "gs": GCSStore}[self._scheme]
        try:
            self._store = make(bucket, prefix=prefix or None, **options)
        except (exceptions.BaseError, ValueError) as error:
            raise UserError(f"{url}: {_reason(error)}; check the variables of the environment") from None

    def list_objects(self) -> list[StoredObject]:
        """All objects below the URL, by name, but for hidden ones, folders and indexes of shards.

        Raises:
            UserError: there are none, or the store refuses.
            Canceled: nobody waits any more.
        """
        found = self._call(THE_BUCKET, self._list)
        if not found:
            raise UserError(f"{self._url}: no object below it; check bucket and prefix")
        folders = {name[:at] for name, *_ in found for at, letter in enumerate(name) if letter == "/"}
        return sorted(each for each in found if each.size or each.name not in folders)  # not what stands for a folder

    def _list(self) -> list[StoredObject]:
        found = []
        for chunk in self._obstore.list(self._store, chunk_size=1000):
            self._outage.end()
            if self._outage.canceled.is_set():
                raise Canceled
            for meta in chunk:
                name = meta["path"]
                if name and not _is_excluded(name):
                    changed = meta["last_modified"]
                    tag = (meta["e_tag"] or changed.isoformat()).strip('"')
                    found.append(StoredObject(name, meta["size"], tag, int(changed.timestamp() * 1e6) * 1000))
        return found

    def read(self, found: StoredObject, start: int, end: int, write: Callable[[Any, int], None]) -> str:
        """Read the bytes from `start` to `end` of an object; goes on at the last byte after an outage.

        Args:
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
            # Not `get_ranges`, which keeps all bytes in memory and does not tell the ETag.
            result = self._obstore.get(self._store, found.name, options={"range": (at, end)})
            meta = result.meta
            # Not `If-Match`: a stream goes on under this ETag anyway, and a change within it would be a GenericError.
            if (meta["e_tag"] or found.tag).strip('"') != found.tag or meta["size"] != found.size:
                raise UserError(
                    f"{self._url}/{found.name}: has changed while it was copied; the same command copies the new one, "
                    "once the upload has ended"
                )
            version = meta["version"] or ""
            for chunk in result.stream(min_chunk_size=CHUNK_BYTES):
                if self._outage.canceled.is_set():
                    raise Canceled
                self._outage.end()
                write(chunk, at)
                at += len(chunk)
            if at < end:
                raise self._errors.GenericError(f"{count(end - at, 'byte')} missing")

        self._call(found.name, go_on)
        return version

    def _call(self, what: str, call: Callable[[], T]) -> T:
        """The result of `call`, which is repeated while the store does not answer."""
        while True:
            try:
                result = call()
            except (self._errors.BaseError, FileNotFoundError) as error:
                if message := self._lasting(what, error):
                    raise UserError(message) from None
                self._outage.wait(_reason(error))
            else:
                self._outage.end()
                return result

    def _lasting(self, what: str, error: Exception) -> str:
        """A message for an error that another try would meet again; "" for an outage.

        The text of the error tells it: in a listing and within a stream every status is obstore's GenericError.
        """
        text, reason = str(error), _reason(error)
        credentials = f"set {_CREDENTIALS[self._scheme]}"
        if not self._outage.has_answered and any(word in text for word in _METADATA):
            return f"{self._url}: no credentials ({reason}); {credentials}"
        if "invalid path" in text:
            return f"{self._url}: an object has no name of a file ({reason}); rename it, or give another prefix"
        found = _STATUS.search(text)
        status = found[1] if found else ""
        if status in ("401", "403"):
            return f"{self._url}: access to {what} is denied ({reason}); {credentials}"
        if status == "404" and what == THE_BUCKET:
            return f"{self._url}: no such bucket; check its name, and the endpoint"
        if status == "404":
            return f"{self._url}/{what}: has vanished while it was copied; start again once the data set is complete"
        is_refused = status[:1] in ("3", "4") and status not in ("408", "429")
        if is_refused or isinstance(error, self._errors.InvalidPathError | self._errors.NotSupportedError):
            return f"{self._url}: the store refuses ({reason}); check bucket, region and endpoint"
        return ""


def _is_excluded(name: str) -> bool:
    # Brisk makes the index again, as the times of the staged shards are others.
    # A name with an empty part or with `..` could lead out of the folder.
    return name.endswith(".index.npz") or any(not part or is_hidden(part) for part in name.split("/"))


def _reason(error: Exception) -> str:
    """Why a request failed, in a few words: obstore's errors have a page of details."""
    text = str(error)
    if found := _CAUSE.findall(text.partition("Debug source:")[2]):
        return str(found[-1])[:120]
    line = re.sub(
        r"Generic \w+ error: |Error performing [\w ]+: |Error performing \w+ \S+ in .*? - ", "", first_line(error)
    )
    code = _CODE.search(text)
    return line.partition("<")[0].rstrip(": ")[:160] + (f", {code[1]}" if code else "")
