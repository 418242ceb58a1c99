"""`GpuNodePolicy` (`gpudra.dev/v1alpha1`) field by field: the grammar, from which the CRD is generated too.

Strict: an unknown or wrongly-cased field is an error. What several policies mean together is decided in
`dra.api.policy`. Descriptions become those of the CRD, which `kubectl explain gpunodepolicy` shows.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator

from dra.api.gpu_settings import MAX_SHARES

MAX_GROUPS = 32
# Slices of the largest GPU; a layout cannot have more partitions.
MAX_PARTITIONS = 8
# Of 32 attributes and capacities of a device, NVIDIA's and the standard ones leave this many free.
MAX_EXTRA_ATTRIBUTES = 8
MAX_WEIGHT = 1000

# JSON Schema patterns are searched, not matched: anchors are theirs. RE2 and Python agree on these.
UUID_PATTERN = r"^GPU-[0-9A-Fa-f]{8}(-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}$"
PCI_PATTERN = r"^([0-9A-Fa-f]{4,8}:)?[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-7]$"
PROFILE_PATTERN = r"^([1-9][0-9]?c\.)?[1-9]g\.[0-9]{1,4}gb(\+(me|gfx|me\.all))?(-me)?$"
# A C identifier, as names of attributes are. Source: resource.k8s.io/v1 QualifiedName.
ATTRIBUTE_PATTERN = r"^[A-Za-z_][A-Za-z0-9_]{0,31}$"
# Set by the driver on shared devices; an extra one on an exclusive GPU would pass it off as shared.
OWN_ATTRIBUTES = ("enforcement", "memoryPerShare", "replicas", "sharing")
# Of a text in a ResourceSlice. Source: resource.k8s.io/v1 DeviceAttributeMaxValueLength, counted in bytes.
MAX_TEXT_BYTES = 64
# Source: semver.org, without what the API's limit of 64 characters forbids anyway.
SEMVER_PATTERN = (
    r"^(0|[1-9][0-9]*)\.(0|[1-9][0-9]*)\.(0|[1-9][0-9]*)(-[0-9A-Za-z-]+(\.[0-9A-Za-z-]+)*)?"
    r"(\+[0-9A-Za-z-]+(\.[0-9A-Za-z-]+)*)?$"
)
LABEL_VALUE_PATTERN = r"^(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?$"

Effect = Literal["NoSchedule", "NoExecute", "None"]
Capability = Literal["compute", "utility", "video", "graphics", "display", "ngx", "compat32", "all"]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, populate_by_name=True)


class LabelRequirement(_Strict):
    """A condition on one label of the node."""

    key: Annotated[str, Field(min_length=1, max_length=317, description="The label.")]
    operator: Annotated[
        Literal["In", "NotIn", "Exists", "DoesNotExist"], Field(description="How it is compared.")
    ]
    values: Annotated[
        list[Annotated[str, StringConstraints(max_length=63)]] | None,
        Field(max_length=64, description="With In and NotIn one or more, else none."),
    ] = None

    @model_validator(mode="after")
    def _values_fit(self) -> LabelRequirement:
        if (self.operator in ("In", "NotIn")) != bool(self.values):
            raise ValueError("values are needed with In and NotIn, and must be absent else")
        return self


class NodeSelector(_Strict):
    """Labels that a node must have; empty: every node."""

    matchLabels: Annotated[  # noqa: N815 - the API's spelling
        dict[str, Annotated[str, StringConstraints(max_length=63)]] | None,
        Field(max_length=32, description="Labels with their values."),
    ] = None
    matchExpressions: Annotated[  # noqa: N815
        list[LabelRequirement] | None, Field(max_length=32, description="All must hold.")
    ] = None


class GpuMatch(_Strict):
    """Which GPUs of a node; what is given must all fit, empty: all. By no index: indices move."""

    product: Annotated[
        str | None,
        Field(
            min_length=1,
            max_length=128,
            description="Product name with * and ?; case, and spaces against dashes, make no difference: NVIDIA-A100*.",
        ),
    ] = None
    uuid: Annotated[
        str | None, Field(max_length=40, pattern=UUID_PATTERN, description="NVML's UUID of the GPU.")
    ] = None
    pciAddress: Annotated[  # noqa: N815
        str | None, Field(max_length=16, pattern=PCI_PATTERN, description="PCI address: 0000:65:00.0.")
    ] = None


class Sharing(_Strict):
    """How claims may share a GPU or its partitions."""

    strategy: Annotated[
        Literal["exclusive", "memory", "shares", "unlimited"],
        Field(
            description="exclusive: one claim; memory: each takes an amount of memory; shares: each takes a number of "
            "equal shares; unlimited: any number of claims."
        ),
    ]
    shares: Annotated[
        int | None, Field(ge=1, le=MAX_SHARES, description="Number of shares, with the strategy shares only.")
    ] = None
    enforcement: Annotated[
        Literal["auto", "none", "cooperative", "per-process", "required"],
        Field(description="By which means the amounts are to hold; auto: the strongest there is."),
    ] = "auto"

    @model_validator(mode="after")
    def _shares_fit(self) -> Sharing:
        if (self.strategy == "shares") != (self.shares is not None):
            raise ValueError("shares is needed with the strategy shares, and must be absent else")
        return self


class Mig(_Strict):
    """Which partitions a GPU has."""

    mode: Annotated[
        Literal["dynamic", "static", "none"],
        Field(
            description="dynamic: made when a claim needs one; static: those of the layout, or those that are found; "
            "none: no partitions."
        ),
    ]
    layout: Annotated[
        dict[
            Annotated[str, StringConstraints(pattern=PROFILE_PATTERN)],
            Annotated[int, Field(ge=1, le=MAX_PARTITIONS)],
        ]
        | None,
        Field(
            min_length=1,
            max_length=MAX_PARTITIONS,
            description="Number of partitions by profile, as mig-devices of mig-parted: {3g.40gb: 1, 1g.10gb: 4}.",
        ),
    ] = None

    @model_validator(mode="after")
    def _layout_fits(self) -> Mig:
        if self.layout is not None and self.mode != "static":
            raise ValueError("layout is for the mode static only")
        if self.layout is not None and sum(self.layout.values()) > MAX_PARTITIONS:
            raise ValueError(f"layout has more than {MAX_PARTITIONS} partitions")
        return self


class Reserved(_Strict):
    """The GPU is published with the taint gpu.nvidia.com/reserved, for those who tolerate it."""

    value: Annotated[
        str, Field(max_length=63, pattern=LABEL_VALUE_PATTERN, description="Value of the taint.")
    ] = ""
    effect: Annotated[Effect, Field(description="Effect of the taint.")] = "NoSchedule"


class AttributeValue(_Strict):
    """A value of one type, as in a ResourceSlice."""

    string: Annotated[str | None, Field(max_length=64, description="Text.")] = None
    int_: Annotated[
        int | None, Field(alias="int", ge=-(2**63), le=2**63 - 1, description="Whole number.")
    ] = None
    bool_: Annotated[bool | None, Field(alias="bool", description="True or false.")] = None
    version: Annotated[
        str | None, Field(max_length=64, pattern=SEMVER_PATTERN, description="Semantic version: 1.2.3.")
    ] = None

    @model_validator(mode="after")
    def _one(self) -> AttributeValue:
        if len(self.model_dump(exclude_none=True)) != 1:
            raise ValueError("exactly one of string, int, bool and version must be given")
        if len((self.string or "").encode()) > MAX_TEXT_BYTES:
            raise ValueError(f"string has more than {MAX_TEXT_BYTES} bytes")
        return self


class XidRule(_Strict):
    """What an XID does to a GPU."""

    xid: Annotated[int, Field(ge=1, le=65535, description="NVIDIA's number of the error.")]
    effect: Annotated[
        Literal["NoSchedule", "NoExecute", "None", "Ignore"],
        Field(description="Effect of the taint; Ignore: the XID is nothing."),
    ]


class Health(_Strict):
    """What differs from the node's health rules."""

    xids: Annotated[list[XidRule] | None, Field(max_length=64, description="Rules for single XIDs.")] = None
    temperatureCelsius: Annotated[  # noqa: N815
        int | None, Field(ge=30, le=150, description="From where on a GPU is too hot.")
    ] = None


class GpuGroup(_Strict):
    """Some GPUs and what holds for them. Each block that is given replaces that of a lesser policy as a whole."""

    match: Annotated[GpuMatch, Field(description="Which GPUs of the node.")] = GpuMatch()
    sharing: Annotated[Sharing | None, Field(description="How claims may share a GPU.")] = None
    mig: Annotated[Mig | None, Field(description="Which partitions a GPU has.")] = None
    reserved: Annotated[Reserved | None, Field(description="Held back for those who tolerate it.")] = None
    attributes: Annotated[
        dict[Annotated[str, StringConstraints(pattern=ATTRIBUTE_PATTERN)], AttributeValue] | None,
        Field(
            max_length=MAX_EXTRA_ATTRIBUTES,
            description="Extra attributes in the domain gpudra.dev: {rail: {int: 3}}.",
        ),
    ] = None
    health: Annotated[Health | None, Field(description="What differs from the node's health rules.")] = None
    timeSlice: Annotated[  # noqa: N815
        Literal["Default", "Short", "Medium", "Long"] | None,
        Field(description="Time-slice while no claim asks for another."),
    ] = None
    driverCapabilities: Annotated[  # noqa: N815
        list[Capability] | None,
        Field(min_length=1, max_length=8, description="Which of the driver's files containers get."),
    ] = None
    telemetryIntervalSeconds: Annotated[  # noqa: N815
        int | None, Field(ge=1, le=3600, description="How often the GPU's counters are read at most.")
    ] = None

    @model_validator(mode="after")
    def _says_something(self) -> GpuGroup:
        if all(getattr(self, name) is None for name in GROUP_BLOCKS):
            raise ValueError(f"a group must have one of {', '.join(GROUP_BLOCKS)}")
        if set(OWN_ATTRIBUTES) & set(self.attributes or ()):
            raise ValueError(f"the driver sets the attributes {', '.join(OWN_ATTRIBUTES)} itself")
        return self


# What a group may say, in the API's spelling.
GROUP_BLOCKS = tuple(name for name in GpuGroup.model_fields if name != "match")


class PolicySpec(_Strict):
    """What a policy says."""

    nodeSelector: Annotated[NodeSelector, Field(description="Which nodes it is for; empty: all.")] = (  # noqa: N815
        NodeSelector()
    )
    weight: Annotated[
        int,
        Field(
            ge=0,
            le=MAX_WEIGHT,
            description="Among policies whose node selectors have as many requirements, the highest wins.",
        ),
    ] = 0
    gpus: Annotated[list[GpuGroup], Field(min_length=1, max_length=MAX_GROUPS, description="Groups of GPUs.")]

    @model_validator(mode="after")
    def _groups_differ(self) -> PolicySpec:
        if len({repr(group.match) for group in self.gpus}) != len(self.gpus):
            raise ValueError("two groups of gpus have the same match")
        return self


def json_schema() -> dict[str, Any]:
    """Give the JSON Schema of the spec, as pydantic writes it, with `$defs`."""
    return PolicySpec.model_json_schema(by_alias=True)
