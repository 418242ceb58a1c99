"""Admission webhooks: which ones a request must pass, how they are called, and what their answers do to it."""

from dra.sim.apiserver.admission.admission import Admission
from dra.sim.apiserver.admission.caller import Services

__all__ = ["Admission", "Services"]
