"""`dra sim fault --help` names what can be switched on."""

from __future__ import annotations

import re

import pytest

from dra.cli.main import main
from dra.sim.switchboard import API_FAULTS, NODE_FAULTS


def test_the_help_names_every_fault_and_no_other(capsys):
    with pytest.raises(SystemExit):
        main(["sim", "fault", "--help"])
    listed = " ".join(capsys.readouterr().out.partition("Of a node:")[2].split()).replace("- ", "-")
    of_node, _, of_api = re.sub(r"\(\d+(, watches)?\)", "", listed).partition("Of `api`:")

    def names(text: str) -> set[str]:
        return {name.strip(" .") for name in text.split(",")}

    assert names(of_node) == set(NODE_FAULTS)
    assert names(of_api) == set(API_FAULTS)
