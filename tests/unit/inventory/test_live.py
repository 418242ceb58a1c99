import threading

import pytest

from dra.host.paths import HostPaths
from dra.inventory.live import LiveInventory, on_bus_of
from dra.inventory.model import Inventory
from dra.values import PciAddress
from tests.unit.inventory.inventory_samples import gpu, inventory, problem


class Scans:
    """Gives what `now` holds; an exception is raised."""

    def __init__(self, now):
        self.now = now
        self.count = 0

    def __call__(self):
        self.count += 1
        if isinstance(self.now, Exception):
            raise self.now
        return self.now


@pytest.fixture
def live():
    made = []

    def make(scan, **options):
        options.setdefault("interval_seconds", 3600)
        options.setdefault("hunt_seconds", 3600)
        made.append(LiveInventory(scan, **options))
        return made[-1]

    yield make
    for each in made:
        each.stop()


def test_the_first_look_is_told_even_when_it_finds_nothing(live):
    heard = []
    inventory_now = live(Scans(Inventory()))
    inventory_now.subscribe(lambda now, difference: heard.append((now, bool(difference))))
    assert inventory_now.current == Inventory()
    assert not inventory_now.wait_for_first(timeout_seconds=0)
    inventory_now.start()
    assert inventory_now.wait_for_first(timeout_seconds=30)
    assert heard == [(Inventory(), False)]


def test_a_rescan_on_request_tells_what_changed_once(live):
    scans, heard = Scans(inventory(gpu(0), gpu(1))), []
    now = live(scans)
    now.subscribe(lambda _, difference: heard.append([each.minor for each in difference.removed]))
    now.start()
    assert now.wait_for_first(timeout_seconds=30)
    scans.now = inventory(gpu(0))
    for _ in range(3):
        assert now.rescan_and_wait(timeout_seconds=30)
    assert heard == [[], [1]]
    assert [each.minor for each in now.current.gpus] == [0]


def test_it_looks_again_by_itself(live):
    scans, twice = Scans(inventory(gpu(0))), threading.Event()
    now = live(scans, interval_seconds=0.01, jitter=lambda: 0)
    now.subscribe(lambda current, _: twice.set() if len(current.gpus) == 2 else None)
    now.start()
    now.wait_for_first(timeout_seconds=30)
    scans.now = inventory(gpu(0), gpu(1))
    assert twice.wait(60)


def test_without_gpus_it_looks_more_often(live):
    scans, found = Scans(Inventory(problems=(problem("DRA-NVML-DRIVER-NOT-LOADED"),))), threading.Event()
    now = live(scans, interval_seconds=3600, hunt_seconds=0.01)
    now.subscribe(lambda current, _: found.set() if current.gpus else None)
    now.start()
    now.wait_for_first(timeout_seconds=30)
    scans.now = inventory(gpu(0))
    assert found.wait(60)


def test_a_scan_that_breaks_keeps_what_is_known_and_says_so(live):
    scans = Scans(inventory(gpu(0)))
    now = live(scans)
    now.start()
    now.wait_for_first(timeout_seconds=30)
    scans.now = RuntimeError("a bug")
    assert now.rescan_and_wait(timeout_seconds=30)
    assert now.current.gpus == (gpu(0),)
    assert "a bug" in now.current.problems[0].message
    scans.now = inventory(gpu(0))
    assert now.rescan_and_wait(timeout_seconds=30)
    assert now.current.problems == ()


def test_a_subscriber_that_fails_takes_nothing_from_the_next(live):
    heard = []
    now = live(Scans(inventory(gpu(0))))

    def bad(*_):
        raise RuntimeError("subscriber bug")

    now.subscribe(bad)
    now.subscribe(lambda current, _: heard.append(current))
    now.start()
    assert now.wait_for_first(timeout_seconds=30)
    assert heard == [inventory(gpu(0))]
    assert now.rescan_and_wait(timeout_seconds=30)


def test_a_log_that_cannot_be_written_does_not_end_it(live):
    class Broken:
        def __getattr__(self, name):
            raise BrokenPipeError("nobody reads the log")

    scans = Scans(inventory(gpu(0)))
    now = live(scans)
    now._log = Broken()
    now.start()
    assert now.wait_for_first(timeout_seconds=30)
    scans.now = RuntimeError("a bug")
    now.subscribe(lambda *_: 1 / 0)
    assert now.rescan_and_wait(timeout_seconds=30)
    assert now.current.gpus == (gpu(0),)
    assert "a bug" in now.current.problems[0].message


def test_a_subscriber_may_ask_and_leave_from_inside(live):
    scans, heard = Scans(inventory(gpu(0))), []
    now = live(scans)

    def told(current, _):
        heard.append(now.current is current)
        leave()
        now.rescan("again")

    leave = now.subscribe(told)
    now.start()
    now.wait_for_first(timeout_seconds=30)
    scans.now = inventory()
    assert now.rescan_and_wait(timeout_seconds=30)
    assert heard == [True]


def test_requests_that_may_wait_are_one_look_and_hold_up_nobody_who_asks_at_once(live):
    scans, third = Scans(inventory(gpu(0))), threading.Event()

    def scan():
        found = scans()
        if scans.count == 3:
            third.set()
        return found

    now = live(scan)
    now.start()
    assert now.wait_for_first(timeout_seconds=30)
    for _ in range(5):
        now.rescan("a partition was made", within_seconds=3600)
    assert now.rescan_and_wait(timeout_seconds=30)
    assert scans.count == 2
    # What was to come was answered by it; a later one comes by itself.
    now.rescan("a partition was made", within_seconds=0.05)
    assert third.wait(30)


def test_a_waiting_rescan_is_answered_by_a_look_that_began_after_it(live):
    inside, go = threading.Event(), threading.Event()
    looks = []

    def scan():
        number = len(looks)
        looks.append(number)
        if number == 1:
            inside.set()
            go.wait(5)
        return inventory(gpu(0)) if number < 2 else inventory(gpu(0), gpu(1))

    now = live(scan)
    now.start()
    now.wait_for_first(timeout_seconds=30)
    now.rescan()
    assert inside.wait(60)
    done = []
    waiter = threading.Thread(target=lambda: done.append(now.rescan_and_wait(timeout_seconds=30)))
    waiter.start()
    go.set()
    waiter.join(10)
    assert done == [True]
    assert len(now.current.gpus) == 2


def test_an_idle_session_is_tidied_between_looks(live):
    tidied = threading.Event()
    calls = []

    def tidy():
        calls.append(1)
        if len(calls) == 2:
            tidied.set()
        return 0.01 if len(calls) < 2 else None

    live(Scans(inventory(gpu(0))), tidy=tidy).start()
    assert tidied.wait(60)


def test_stop_ends_the_thread(live):
    now = live(Scans(inventory(gpu(0))))
    now.start()
    now.wait_for_first(timeout_seconds=30)
    now.stop()
    assert not now._thread.is_alive()
    assert now.rescan_and_wait(timeout_seconds=1) is False


def test_a_gpu_counts_as_on_the_bus_while_the_nvidia_driver_has_it(tmp_path):
    address = PciAddress.parse("0000:10:00.0")
    folder = tmp_path / "sys/bus/pci/devices/0000:10:00.0"
    folder.mkdir(parents=True)
    on_bus = on_bus_of(HostPaths(host_root=tmp_path))
    assert not on_bus(address)
    (folder / "driver").symlink_to("../../../../bus/pci/drivers/nvidia")
    assert on_bus(address)
    (folder / "driver").unlink()
    (folder / "driver").symlink_to("../../../../bus/pci/drivers/vfio-pci")
    assert not on_bus(address)
