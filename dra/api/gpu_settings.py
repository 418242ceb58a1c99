"""What holds for one GPU: how it is shared, cut, held back and published. Pure, without pydantic.

    settings = parse_sharing("exclusive,NVIDIA-L40S=10")
    settings.of(GpuIdentity(gpu.uuid, gpu.product_name, gpu.pci_address)).sharing.strategy

Layers lie over each other: the built-in values, the flags, then the groups of a GpuNodePolicy. A layer replaces
whole blocks (`sharing`, `mig`, ...), never single fields of one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from fnmatch import fnmatchcase
from typing import Any, Literal, get_args

from dra.errors import ConfigError, ValueFormatError
from dra.values import PciAddress

Strategy = Literal["exclusive", "memory", "shares", "unlimited"]
# What is asked for: the strongest means there is; nothing; limits each process keeps by itself; limits that the
# control daemon of each claim sets; `required`: as auto, and no claim is prepared without it.
EnforcementMode = Literal["auto", "none", "cooperative", "per-process", "required"]
MigModeSetting = Literal["dynamic", "static", "none"]
TimeSlice = Literal["Default", "Short", "Medium", "Long"]
TaintEffect = Literal["NoSchedule", "NoExecute", "None"]

ENFORCEMENTS: tuple[EnforcementMode, ...] = get_args(EnforcementMode)
# More would be a typing error: a share of a GPU of less than a thousandth is none.
MAX_SHARES = 1000


@dataclass(frozen=True, slots=True)
class SharingSettings:
    """How claims may share a device. Source: NVIDIA's `--consumable-shares`.

    Args:
        strategy: `exclusive`: one claim; `memory`: each takes an amount of memory, all of it if it names none;
            `shares`: each takes a number of equal shares, one if it names none; `unlimited`: any number of claims.
        shares: the number of shares of a device, 0 for other strategies.
        enforcement: by which means the amounts are to hold.
    """

    strategy: Strategy = "exclusive"
    shares: int = 0
    enforcement: EnforcementMode = "auto"

    @property
    def shared(self) -> bool:
        """Whether several claims may hold one device."""
        return self.strategy != "exclusive"

    @classmethod
    def parse(cls, text: str) -> SharingSettings:
        """Read `KIND` or `KIND/ENFORCEMENT`: `disabled`, `exclusive`, `memory`, `unlimited` or a number of shares.

        Raises:
            ConfigError: DRA-SHARING-KIND.
        """
        kind, slash, enforcement = (part.strip() for part in text.partition("/"))
        if slash and enforcement not in ENFORCEMENTS:
            raise ConfigError(
                "DRA-SHARING-KIND",
                f"{enforcement[:64]!r} in {text[:128]!r} is no way of enforcing a share",
                remedy=f"Use one of {', '.join(ENFORCEMENTS)}.",
            )
        mode: EnforcementMode = next((each for each in ENFORCEMENTS if each == enforcement), "auto")
        if kind in ("", "disabled", "exclusive"):
            return cls("exclusive", 0, mode)
        if kind in ("memory", "unlimited"):
            return cls("memory" if kind == "memory" else "unlimited", 0, mode)
        if re.fullmatch(r"[0-9]{1,6}", kind, re.ASCII) and 1 <= int(kind) <= MAX_SHARES:
            return cls("shares", int(kind), mode)
        raise ConfigError(
            "DRA-SHARING-KIND",
            f"{kind[:64]!r} is no way of sharing a GPU",
            remedy=f"Use exclusive, memory, unlimited, or a number of shares from 1 to {MAX_SHARES}.",
        )

    def __str__(self) -> str:
        """Give the text that `parse` reads."""
        kind = str(self.shares) if self.strategy == "shares" else self.strategy
        return kind if self.enforcement == "auto" else f"{kind}/{self.enforcement}"


@dataclass(frozen=True, slots=True)
class MigSettings:
    """Which partitions a GPU has.

    Args:
        mode: made on demand, those that exist, or none. None: as the node's flag says.
        layout: for a static layout: (profile, number), in the order in which they are made; empty: as it is found.
    """

    mode: MigModeSetting | None = None
    layout: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True)
class ReservedSettings:
    """A GPU that is published with the taint `gpu.nvidia.com/reserved`, for those who tolerate it."""

    value: str = ""
    effect: TaintEffect = "NoSchedule"


@dataclass(frozen=True, slots=True)
class HealthSettings:
    """What differs from the node's health rules on a GPU.

    Args:
        xids: effect by XID; the effect `Ignore` makes an XID nothing.
        temperature_celsius: from where on a GPU is too hot; None: as the hardware says.
    """

    xids: Mapping[int, Literal["NoSchedule", "NoExecute", "None", "Ignore"]] = field(default_factory=dict)
    temperature_celsius: int | None = None


@dataclass(frozen=True, slots=True)
class GpuSettings:
    """Everything that holds for one GPU.

    Args:
        sharing, mig, health: their blocks.
        reserved: None: for everybody.
        attributes: extra attributes in the API's form, by name in the domain `gpudra.dev`: `{"rail": {"int": 3}}`.
        driver_capabilities: which of the driver's files containers get; None: as the node's flag says.
        time_slice: the quantum while no claim asks for another; None: the driver's own.
        telemetry_interval_seconds: None: as the node's flag says.
    """

    sharing: SharingSettings = SharingSettings()
    mig: MigSettings = MigSettings()
    reserved: ReservedSettings | None = None
    attributes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    driver_capabilities: tuple[str, ...] | None = None
    health: HealthSettings = HealthSettings()
    time_slice: TimeSlice | None = None
    telemetry_interval_seconds: float | None = None


# Names of the blocks, each of which is replaced as a whole.
BLOCKS: tuple[str, ...] = tuple(each.name for each in fields(GpuSettings))
# Those that change the meaning of a device that somebody may have: they change on idle GPUs only.
IDLE_BLOCKS: tuple[str, ...] = ("sharing", "mig", "time_slice")


def block_name(block: str) -> str:
    """Give a block's name as policies write it: `time_slice` is `timeSlice`."""
    first, *rest = block.split("_")
    return first + "".join(each.capitalize() for each in rest)


@dataclass(frozen=True, slots=True)
class GpuIdentity:
    """By what a GPU can be chosen: UUID, NVML's product name, PCI address. No index, for those move."""

    uuid: str = ""
    product: str = ""
    pci_address: PciAddress | None = None


@dataclass(frozen=True, slots=True)
class GpuSelector:
    """Which GPUs something is for; empty: all. What is given must all fit.

    `product` is a pattern of the whole name with `*` and `?`; case, and spaces against dashes, make no difference,
    so `NVIDIA-A100*`, as in node labels, is `NVIDIA A100-SXM4-40GB` too.
    """

    uuid: str = ""
    product: str = ""
    pci_address: PciAddress | None = None

    @classmethod
    def parse(cls, text: str) -> GpuSelector:
        """Read a UUID (`GPU-...`), a PCI address or else a pattern of product names."""
        text = text.strip()
        if text.upper().startswith("GPU-"):
            return cls(uuid=text)
        try:
            return cls(pci_address=PciAddress.parse(text))
        except ValueFormatError:
            return cls(product=text)

    def fits(self, gpu: GpuIdentity) -> bool:
        """Whether it chooses a GPU."""
        return (
            (not self.uuid or self.uuid.lower() == gpu.uuid.lower())
            and (self.pci_address is None or self.pci_address == gpu.pci_address)
            and (not self.product or fnmatchcase(_plain(gpu.product), _pattern(self.product)))
        )

    @property
    def rank(self) -> int:
        """How exact it is: the UUID most, then the PCI address, then the product."""
        return 4 * bool(self.uuid) + 2 * (self.pci_address is not None) + bool(self.product)

    def __str__(self) -> str:
        """Give it for people; the empty text chooses all."""
        named = (self.uuid, "" if self.pci_address is None else str(self.pci_address), self.product)
        return " ".join(each for each in named if each)


def _plain(product: str) -> str:
    return re.sub(r"[\s_-]+", "-", product.strip().lower())


def _pattern(product: str) -> str:
    # [ would start a set of characters.
    return _plain(product).replace("[", "[[]")


@dataclass(frozen=True, slots=True)
class SettingsLayer:
    """Blocks for some GPUs. `blocks` has names and values of fields of `GpuSettings`; `source` says whose they are."""

    selector: GpuSelector
    blocks: Mapping[str, Any]
    source: str = ""


@dataclass(frozen=True, slots=True)
class NodeSettings:
    """What holds on one node: a base for all GPUs, and layers over it, the later ones above.

    Of the layers that are added together, the less exact selector lies below. Two that compare equal say the same.
    """

    base: GpuSettings = GpuSettings()
    layers: tuple[SettingsLayer, ...] = ()

    def over(self, layers: Iterable[SettingsLayer]) -> NodeSettings:
        """Give these settings with more layers above; among the new ones the more exact selector lies above."""
        added = sorted(layers, key=lambda layer: layer.selector.rank)
        return NodeSettings(self.base, (*self.layers, *added))

    def of(self, gpu: GpuIdentity) -> GpuSettings:
        """Give what holds for a GPU."""
        blocks = self._blocks(gpu)
        if not blocks:
            return self.base
        base = {name: getattr(self.base, name) for name in BLOCKS}
        return GpuSettings(**(base | {name: layer.blocks[name] for name, layer in blocks.items()}))

    @property
    def share_something(self) -> bool:
        """Whether any GPU may be shared by several claims."""
        asked = (self.base.sharing, *(layer.blocks.get("sharing") for layer in self.layers))
        return any(isinstance(each, SharingSettings) and each.shared for each in asked)

    def source_of(self, gpu: GpuIdentity, block: str) -> str:
        """Say whose word a block of a GPU's settings is; empty: the base's."""
        layer = self._blocks(gpu).get(block)
        return "" if layer is None else layer.source

    def _blocks(self, gpu: GpuIdentity) -> dict[str, SettingsLayer]:
        found: dict[str, SettingsLayer] = {}
        for layer in self.layers:
            if layer.selector.fits(gpu):
                found.update(dict.fromkeys(layer.blocks, layer))
        return found


# What holds where nobody says anything.
NO_SETTINGS = NodeSettings()


def parse_sharing(text: str) -> NodeSettings:
    """Read the flag `--sharing`: `KIND`, or with commas `[GPUS=]KIND` for some GPUs.

    `10` · `exclusive,NVIDIA-L40S=10` · `memory,GPU-5a2c...=unlimited/none,0000:65:00.0=exclusive`

    Raises:
        ConfigError: DRA-SHARING-KIND.
    """
    base = SharingSettings()
    layers: list[SettingsLayer] = []
    for entry in (part.strip() for part in text.split(",")):
        selector, equals, kind = entry.rpartition("=")
        if not equals:
            base = SharingSettings.parse(kind) if kind else base
            continue
        if not selector.strip():
            raise ConfigError(
                "DRA-SHARING-KIND",
                f"{entry[:128]!r} names no GPU",
                remedy="Write GPUS=KIND, where GPUS is a product name, a UUID or a PCI address.",
            )
        layers.append(
            SettingsLayer(GpuSelector.parse(selector), {"sharing": SharingSettings.parse(kind)}, "--sharing")
        )
    return NodeSettings(GpuSettings(sharing=base)).over(layers)
