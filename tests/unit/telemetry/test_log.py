"""Log lines: JSON, one an event, and never a reason to stop."""

from __future__ import annotations

import io
import json

from dra.errors import DraError
from dra.telemetry.log import bound, configure, error_fields, get_logger


def test_an_event_is_one_line_of_json_with_the_fields_of_logger_thread_and_call():
    out = io.StringIO()
    configure(stream=out)
    with bound(claim_uid="u1"):
        get_logger(node="n1").info("claim_prepared", device="gpu-0", text="two\nlines")
    line = out.getvalue()
    assert line.count("\n") == 1
    event = json.loads(line)
    assert event.pop("timestamp").endswith("Z")
    assert event == {
        "event": "claim_prepared", "level": "info", "node": "n1", "claim_uid": "u1", "device": "gpu-0",
        "text": "two\nlines",
    }  # fmt: skip


def test_events_below_the_level_are_not_written():
    out = io.StringIO()
    configure(stream=out, level="warning")
    get_logger().info("quiet")
    assert not out.getvalue()


def test_a_stream_that_is_closed_loses_the_line_and_nothing_else():
    out = io.StringIO()
    configure(stream=out)
    log = get_logger()
    out.close()
    log.error("nobody_hears")
    try:
        raise RuntimeError("inside")
    except RuntimeError:
        log.exception("nobody_hears_this_either")


def test_an_exception_is_logged_with_its_traceback():
    out = io.StringIO()
    configure(stream=out)
    try:
        raise RuntimeError("inside")
    except RuntimeError:
        get_logger().exception("it_broke")
    assert "RuntimeError: inside" in json.loads(out.getvalue())["exception"]


def test_an_error_s_own_fields_never_clash_with_the_caller_s():
    out = io.StringIO()
    configure(stream=out)
    error = DraError("DRA-X", "it is so", remedy="Do that.", name="other", event="e", level="l")
    get_logger().warning("failed", name="mine", **error_fields(error))
    event = json.loads(out.getvalue())
    assert (event["event"], event["name"], event["error_fields"]["name"]) == ("failed", "mine", "other")
    assert (event["error_code"], event["remedy"]) == ("DRA-X", "Do that.")


def test_an_unforeseen_exception_has_a_code_too():
    assert error_fields(KeyError("k")) == {"error_code": "DRA-BUG", "error": "KeyError: 'k'"}
