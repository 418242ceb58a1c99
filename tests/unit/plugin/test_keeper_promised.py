"""A keeper that is replaced is away for a moment: claims wait for it, and are not prepared without their limits."""

from __future__ import annotations

from dra.errors import HostError
from dra.plugin.keeper_presence import KeeperPresence
from dra.plugin.sharing import HeardKeeper


def test_a_keeper_that_was_there_is_waited_for_until_its_absence_is_published(tmp_path, monkeypatch):
    away = {"away": False}

    def hello(_self):
        if away["away"]:
            raise HostError("DRA-MPS-KEEPER-ABSENT", "nobody answers")
        return {}

    monkeypatch.setattr(HeardKeeper, "hello", hello)
    keeper = HeardKeeper(tmp_path)
    published = []
    presence = KeeperPresence(keeper, published.append)
    keeper.promised = presence.present
    assert keeper.available()
    presence.look()
    away["away"] = True
    presence.look()
    assert keeper.available()
    for _ in range(4):
        presence.look()
    assert published == [True, False]
    assert not keeper.available()
