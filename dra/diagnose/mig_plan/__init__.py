"""`dra mig plan`: which MIG layouts hold a wanted mix, what they strand, and what would have to move. Data only."""

from dra.diagnose.mig_plan.model import GpuState, Layout, Move, Piece, Plan, Profile, Wanted
from dra.diagnose.mig_plan.search import make_plan
from dra.diagnose.mig_plan.sources import gpus_in_cluster, gpus_of_inventory
from dra.diagnose.mig_plan.wanted import parse_mix, wanted_in

__all__ = [
    "GpuState",
    "Layout",
    "Move",
    "Piece",
    "Plan",
    "Profile",
    "Wanted",
    "gpus_in_cluster",
    "gpus_of_inventory",
    "make_plan",
    "parse_mix",
    "wanted_in",
]
