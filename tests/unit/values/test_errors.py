from __future__ import annotations

import pickle

import pytest

from dra.errors import ConfigError, DraError, KubeError


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        ("gpu\u202egnp.exe", r"gpu\u202egnp.exe"),
        ("a\x1b[31mred", r"a\x1b[31mred"),
        ("nul\x00", r"nul\x00"),
        ("zero\u200bwidth", r"zero\u200bwidth"),
        ("\u2066isolated\u2069", r"\u2066isolated\u2069"),
        ("lone \ud800 surrogate", r"lone \ud800 surrogate"),
        ("c1 \x9b control", r"c1 \x9b control"),
        ("tag \U000e0041", r"tag \U000e0041"),
    ],
)
def test_characters_that_do_not_print_are_escaped_wherever_a_user_reads_an_error(written, shown):
    for kind in (DraError, ConfigError, KubeError):
        error = kind("DRA-TEST", f"field {written}", remedy=f"Remove {written}.")
        assert error.message == f"field {shown}"
        assert error.remedy == f"Remove {shown}."
        assert str(error).isprintable()
        assert error.args == (error.message,)
        str(error).encode("utf-8")


def test_letters_of_all_scripts_and_signs_stay_as_they_are():
    text = "Größe Имя 名前 اسم 😀 é"
    assert DraError("DRA-TEST", text).message == text


def test_line_ends_and_tabs_become_one_space():
    assert DraError("DRA-TEST", "a\n\n\tb\u2028c\x85d").message == "a b c d"


def test_an_error_that_was_pickled_says_the_same():
    error = DraError("DRA-TEST", "a\\b \u202e", remedy="c \u202e")
    again = pickle.loads(pickle.dumps(error))  # noqa: S301 - our own bytes
    assert str(again) == str(error)
