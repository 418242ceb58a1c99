"""Reading a claim from the API server with a deadline that holds, whatever the connection does.

The client has timeouts of its own, but those are counted per socket operation: an answer that trickles, or a
name that does not resolve, may take longer. The call is made in a thread that this one does not wait for beyond
its deadline; the number of such threads is bounded.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any

from dra.api.claim import ClaimRef, claim_not_found
from dra.errors import HostError, KubeError
from dra.prepare.model import ClaimSource, says_gone
from dra.prepare.workers import WorkerPool

# Well below the kubelet's 45 s, so that the pod's Event names the cause.
API_DEADLINE_SECONDS = 8.0
# With a complete record the API is only asked whether something changed.
RECORD_WAIT_SECONDS = 0.040
# How long such a call may go on in the background.
_BACKGROUND_SECONDS = 2.0


class ClaimFetcher:
    """Reads claims. Thread-safe."""

    def __init__(
        self,
        source: ClaimSource,
        *,
        deadline_seconds: float = API_DEADLINE_SECONDS,
        record_wait_seconds: float = RECORD_WAIT_SECONDS,
        threads: int = 32,
    ) -> None:
        self._source = source
        self._deadline_seconds = deadline_seconds
        self._record_wait_seconds = record_wait_seconds
        self._pool = WorkerPool("claim-fetch", limit=threads)
        # A call that ends at once runs its callback in this thread.
        self._mutex = threading.RLock()
        self._background: dict[str, tuple[Future[Mapping[str, Any]], float]] = {}

    def fetch(self, ref: ClaimRef) -> Mapping[str, Any]:
        """Give the claim.

        Raises:
            ClaimError: DRA-CLAIM-NOT-FOUND.
            KubeError: the API server refused; DRA-API-TIMEOUT where it did not answer in time.
        """
        seconds = self._deadline_seconds
        future = self._pool.submit(lambda: self._source.get(ref.namespace, ref.name, seconds))
        try:
            return future.result(seconds)
        except FutureTimeoutError as error:
            future.cancel()
            raise KubeError(
                "DRA-API-TIMEOUT",
                f"the API server did not give claim {ref} within {seconds:g} s",
                remedy="Check that the API server answers this node; the call is retried by itself.",
                claim_uid=ref.uid,
            ) from error
        except KubeError as error:
            if says_gone(error):
                raise claim_not_found(ref) from error
            raise

    def fetch_if_quick(self, ref: ClaimRef) -> Mapping[str, Any] | None:
        """Give the claim if the API server has it ready within 40 ms; None where it does not answer.

        One call a claim at most is under way, however often this is asked; the 40 ms are that call's, so that
        only the first of many questions waits for a server that hangs.

        Raises:
            ClaimError: DRA-CLAIM-NOT-FOUND, which is an answer.
        """
        with self._mutex:
            future, began = self._background.get(ref.uid, (None, time.monotonic()))
            if future is None:
                try:
                    future = self._pool.submit(
                        lambda: self._source.get(ref.namespace, ref.name, _BACKGROUND_SECONDS)
                    )
                except HostError:  # the system gives no thread: the record will do
                    return None
                self._background[ref.uid] = future, began
                future.add_done_callback(lambda ended: self._forget(ref.uid, ended))
        try:
            return future.result(max(0.0, began + self._record_wait_seconds - time.monotonic()))
        except FutureTimeoutError:
            future.cancel()
            return None
        except CancelledError:
            # Another caller gave up before the call had its turn.
            return None
        except KubeError as error:
            if says_gone(error):
                raise claim_not_found(ref) from error
            return None

    def _forget(self, uid: str, ended: Future[Mapping[str, Any]]) -> None:
        with self._mutex:
            if self._background.get(uid, (None, 0.0))[0] is ended:
                del self._background[uid]
