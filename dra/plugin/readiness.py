"""What the driver still waits for, by name. Alive and ready are two questions."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

Condition = Callable[[], str]


class Readiness:
    """A set of named conditions; each gives an empty text, or says what is missing.

    A condition is a fact that somebody sets (`set`) or a question that is asked each time (`ask`, which must not
    wait for anything). Safe from all threads.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._facts: dict[str, str] = {}
        self._questions: dict[str, Condition] = {}

    def set(self, name: str, missing: str) -> None:
        """State a fact: `missing` is empty when the condition holds."""
        with self._lock:
            self._facts[name] = missing

    def ask(self, name: str, question: Condition) -> None:
        """Ask `question` whenever readiness is looked at."""
        with self._lock:
            self._questions[name] = question

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all conditions, in order."""
        with self._lock:
            return tuple(sorted({*self._facts, *self._questions}))

    def missing(self) -> Mapping[str, str]:
        """Give what is missing, by condition; empty when ready."""
        with self._lock:
            facts, questions = dict(self._facts), dict(self._questions)
        answers = {**facts, **{name: question() for name, question in questions.items()}}
        return {name: text for name, text in sorted(answers.items()) if text}
