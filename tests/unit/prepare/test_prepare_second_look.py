"""A claim is released only if the API server, which was asked about this very claim, says so twice."""

from __future__ import annotations

import pytest
from prepare_fakes import make_claim, result, uid_of, wait_until

from dra.api.claim import ClaimRef
from dra.errors import DraError, KubeError
from dra.prepare import janitor as the_janitor
from dra.prepare.janitor import INTERVAL_SECONDS, SPEC_SECONDS
from dra.prepare.sweep.patience import CONFIRM_SECONDS

MANY_SECONDS = 3 * CONFIRM_SECONDS


def prepared(node, count):
    refs = [node.claim(n, f"gpu-{n}") for n in range(count)]
    for ref in refs:
        node.prepared(ref)
    return refs


def careful(node, **more):
    return node.janitor(confirm_seconds=CONFIRM_SECONDS, **more)


def gone(node, ref):
    node.api.delete(ref)


def replaced(node, ref):
    node.api.put(make_claim(ClaimRef(ref.namespace, ref.name, uid_of(77)), result("gpu-5")))


def deallocated(node, ref):
    node.api.put({**make_claim(ref), "status": {}})


def moved(node, ref):
    node.api.put(make_claim(ref, result("gpu-0", pool="node-b")))


@pytest.mark.parametrize("change", [gone, replaced, deallocated, moved])
def test_a_claim_that_the_api_no_longer_has_is_released_by_the_second_look(node, change):
    ref, other, third = prepared(node, 3)
    janitor = careful(node)
    change(node, ref)
    assert janitor.sweep().waiting == [ref.uid]
    node.now += CONFIRM_SECONDS - 0.1
    assert janitor.sweep().released == []
    node.now += 0.1
    assert janitor.sweep().released == [ref.uid]
    assert node.cdi_file(other).exists()
    assert node.cdi_file(third).exists()


@pytest.mark.parametrize("change", [gone, replaced, deallocated, moved])
def test_a_claim_that_was_gone_for_one_look_only_is_kept(node, change):
    (ref,) = prepared(node, 1)
    janitor = careful(node)
    claim = node.api.get(ref.namespace, ref.name, 1)
    for _ in range(3):
        change(node, ref)
        assert janitor.sweep().waiting == [ref.uid]
        node.now += 60
        node.api.put(claim)
        assert janitor.sweep().waiting == []
        node.now += 60
    assert node.cdi_file(ref).exists()
    assert node.notices == []


def test_an_api_that_lost_most_claims_at_once_is_given_time_to_find_them(node):
    refs = prepared(node, 4)
    janitor = careful(node)
    claims = dict(node.api.claims)
    node.api.claims.clear()
    for _ in range(3):
        assert sorted(janitor.sweep().waiting) == sorted(ref.uid for ref in refs)
        node.now += CONFIRM_SECONDS - 0.1
    node.api.claims.update(claims)
    assert janitor.sweep().waiting == []
    assert all(node.cdi_file(ref).exists() for ref in refs)


def test_claims_that_really_went_together_are_released_together_after_the_longer_wait(node):
    refs = prepared(node, 4)
    janitor = careful(node)
    node.api.claims.clear()
    assert janitor.sweep().released == []
    node.now += MANY_SECONDS
    assert sorted(janitor.sweep().released) == sorted(ref.uid for ref in refs)
    assert node.files() == []


def test_half_of_the_claims_are_not_many_and_neither_are_two_of_two(node):
    four = prepared(node, 4)
    janitor = careful(node)
    for ref in four[:2]:
        node.api.delete(ref)
    janitor.sweep()
    node.now += CONFIRM_SECONDS
    assert len(janitor.sweep().released) == 2
    for ref in four[2:]:
        node.api.delete(ref)
    janitor.sweep()
    node.now += CONFIRM_SECONDS
    assert len(janitor.sweep().released) == 2


def test_lost_records_wait_for_a_second_list_too(node):
    refs = prepared(node, 3)
    for ref in refs:
        node.record_file(ref).write_bytes(b"")
    claims = dict(node.api.claims)
    node.restart()
    janitor = careful(node)
    node.api.claims.clear()
    assert len(janitor.sweep().waiting) == 3
    node.now += MANY_SECONDS - 0.1
    assert janitor.sweep().released == []
    node.api.claims.update(claims)
    assert sorted(janitor.sweep().rebuilt) == sorted(ref.uid for ref in refs)
    assert all(node.cdi_file(ref).exists() for ref in refs)


def test_a_claim_that_went_is_released_within_a_minute_also_if_all_went():
    """The first look may come a whole interval after the deletion; second looks come with the look at the specs."""
    assert INTERVAL_SECONDS + MANY_SECONDS + SPEC_SECONDS <= 60


@pytest.mark.parametrize("code", ["DRA-API-NOT-SERVED", "DRA-API-OTHER-NOT-FOUND", "DRA-API-BAD-ANSWER"])
def test_an_answer_that_is_not_about_the_claim_releases_nothing_however_often_it_comes(node, code):
    refs = prepared(node, 3)
    get = node.api.get

    def refuse(namespace, name, timeout_seconds):
        raise KubeError(code, "404 page not found", status=404, reason="NotFound")

    node.api.get = refuse
    janitor = careful(node)
    for _ in range(5):
        report = janitor.sweep()
        assert (report.released, report.waiting) == ([], [])
        node.now += 60
    # The pods' containers go on as they are, and a new claim is told to wait.
    for ref in refs:
        assert not isinstance(node.prepare(ref), DraError)
    error = node.refused(node.claim(9, "gpu-7"))
    assert (error.code, error.retryable) == (code, True)
    assert "does not exist (UID" not in error.message
    node.api.get = get
    assert janitor.sweep().waiting == []
    assert all(node.cdi_file(ref).exists() for ref in refs)


def test_what_was_learned_before_the_api_fell_silent_still_counts(node):
    first, second, third = prepared(node, 3)
    node.api.delete(first)
    janitor = careful(node)
    janitor.sweep()
    node.now += CONFIRM_SECONDS
    get = node.api.get

    def silent(namespace, name, timeout_seconds):
        if name == third.name:
            raise KubeError("DRA-API-TIMEOUT", "no answer")
        return get(namespace, name, timeout_seconds)

    node.api.get = silent
    report = janitor.sweep()
    assert (report.released, report.api_answered) == ([first.uid], False)
    assert node.cdi_file(second).exists()


def test_the_thread_takes_the_second_look_by_itself(node, monkeypatch):
    monkeypatch.setattr(the_janitor, "SPEC_SECONDS", 0.01)
    (ref,) = prepared(node, 1)
    node.api.delete(ref)
    janitor = careful(node, interval_seconds=3600)
    janitor.start()
    wait_until(lambda: node.api.gets[ref.name] >= 2)
    assert node.record_file(ref).exists()
    node.now += CONFIRM_SECONDS
    wait_until(lambda: node.files() == [])
    janitor.stop()
