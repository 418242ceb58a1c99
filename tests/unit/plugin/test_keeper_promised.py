"""A keeper that is replaced is away for a moment: claims wait for it, and are not prepared without their limits."""

from __future__ import annotations

from dra.errors import HostError
from dra.plugin.keeper_presence import AWAY_SECONDS, KeeperPresence
from dra.plugin.sharing import HeardKeeper


def test_a_keeper_that_was_there_is_waited_for_until_its_absence_is_published(tmp_path, monkeypatch):
    state = {"away": False, "now": 0.0, "asked": 0}

    def hello(_self):
        state["asked"] += 1
        if state["away"]:
            raise HostError("DRA-MPS-KEEPER-ABSENT", "nobody answers")
        return {}

    monkeypatch.setattr(HeardKeeper, "hello", hello)
    keeper = HeardKeeper(tmp_path)
    published = []
    presence = KeeperPresence(
        keeper, published.append, folder=tmp_path / "mps", monotonic=lambda: state["now"]
    )
    keeper.promised = presence.present
    assert keeper.available()
    presence.look()
    state.update(away=True, asked=0)
    # A promise is kept without a question: whoever starts the daemon finds out.
    assert keeper.available()
    assert state["asked"] == 0
    presence.look()
    assert keeper.available()
    state["now"] += AWAY_SECONDS
    presence.look()
    assert published == [True, False]
    assert not keeper.available()
