"""The limits of ResourceSlices. Here and nowhere else; imports nothing, so that the daemon can have them.

Source: staging/src/k8s.io/api/resource/v1/types.go of Kubernetes 1.36; of the versions before 1.35 where that is said.
"""

from __future__ import annotations

MAX_DEVICES = 128
# With taints, counters or list attributes on any device of the slice.
MAX_DEVICES_WITH_EXTRAS = 64
MAX_ATTRIBUTES_AND_CAPACITIES = 32
MAX_VALUE_BYTES = 64
MAX_TAINTS = 16
MAX_CONDITIONS = 4
MAX_VALID_VALUES = 10
MAX_COUNTER_SETS = 8
MAX_COUNTERS = 32  # of a set, and of what a device uses of one
MAX_CONSUMED_SETS = 2
# Before 1.35: in all counter sets of a slice, and of all devices of a slice.
MAX_COUNTERS_IN_SLICE = 32
MAX_CONSUMED_IN_SLICE = 1024
MAX_DRIVER = 63
MAX_POOL = 253
MAX_IDENTIFIER = 32
