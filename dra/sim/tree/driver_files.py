"""The user-space half of a driver installation: libraries, programs, firmware, configuration files.

What is listed follows a data-centre package of the 580 branch; the graphics parts are apart, as in the
packages. Source: the file lists of NVIDIA's Debian and RPM packages.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from dra.sim.tree import elf
from dra.sim.tree.ldcache import ld_so_cache
from dra.sim.tree.nodes import make_link, make_socket, under, write_bytes, write_text
from dra.sim.tree.programs import STAND_INS, stand_in

# name without .so -> SONAME suffix; "" where the SONAME is the file's own name
_COMPUTE = {
    "libcuda": "1", "libcudadebugger": "1", "libnvcuvid": "1", "libnvidia-allocator": "1", "libnvidia-cfg": "1",
    "libnvidia-encode": "1", "libnvidia-gpucomp": "", "libnvidia-ml": "1", "libnvidia-nvvm": "4",
    "libnvidia-opencl": "1", "libnvidia-opticalflow": "1", "libnvidia-pkcs11": "", "libnvidia-pkcs11-openssl3": "",
    "libnvidia-ptxjitcompiler": "1", "libnvidia-sandboxutils": "1", "vdpau/libvdpau_nvidia": "1",
}  # fmt: skip
_GRAPHICS = {
    "libEGL_nvidia": "0", "libGLESv1_CM_nvidia": "1", "libGLESv2_nvidia": "2", "libGLX_nvidia": "0",
    "libnvidia-eglcore": "", "libnvidia-fbc": "1", "libnvidia-glcore": "", "libnvidia-glsi": "",
    "libnvidia-glvkspirv": "", "libnvidia-ngx": "1", "libnvidia-rtcore": "", "libnvidia-tls": "",
    "libnvidia-vksc-core": "1", "libnvoptix": "1",
}  # fmt: skip
# These carry versions of their own and are found by pattern.
_OWN_VERSION = {
    "libnvidia-egl-gbm": ("1", "1.1.2"),
    "libnvidia-egl-wayland": ("1", "1.1.20"),
    "libnvidia-egl-xcb": ("1", "1.0.3"),
    "libnvidia-egl-xlib": ("1", "1.0.3"),
}
# Development links exist only where a package ships them.
_BARE_LINKS = frozenset(_COMPUTE) - {"libcudadebugger", "libnvidia-opencl", "libnvidia-opticalflow"}

_PROGRAMS = ("nvidia-cuda-mps-control", "nvidia-cuda-mps-server", "nvidia-debugdump", "nvidia-imex",
             "nvidia-imex-ctl", "nvidia-persistenced", "nvidia-smi")  # fmt: skip
_GRAPHICS_FILES = (
    "/usr/share/egl/egl_external_platform.d/10_nvidia_wayland.json",
    "/usr/share/egl/egl_external_platform.d/15_nvidia_gbm.json",
    "/usr/share/egl/egl_external_platform.d/20_nvidia_xcb.json",
    "/usr/share/egl/egl_external_platform.d/20_nvidia_xlib.json",
    "/usr/share/vulkan/icd.d/nvidia_icd.json",
    "/usr/share/vulkan/implicit_layer.d/nvidia_layers.json",
    "/usr/share/glvnd/egl_vendor.d/10_nvidia.json",
    "/usr/share/nvidia/nvoptix.bin",
)

# Makes the uvm nodes as the real program does, relative to the root it is installed in; falls back to the
# stand-ins of a tree built without the right to mknod.
_MODPROBE = """#!/bin/sh
root=$(cd "$(dirname "$0")/../.." && pwd)
proc=${NVIDIA_SIM_PROC:-$root/proc}
major=$(awk '$2 == "nvidia-uvm" { print $1 }' "$proc/devices") || exit 1
[ -n "$major" ] || exit 1
mkdir -p "$root/dev"
make() {
    [ -e "$root/dev/$1" ] && return
    mknod -m 666 "$root/dev/$1" c "$2" "$3" 2>/dev/null || printf 'simulated-device c %s %s gid 0\\n' "$2" "$3" > "$root/dev/$1"
}
make nvidiactl 195 255
for minor in $(sed -n 's/^Device Minor:[^0-9]*//p' "$proc"/driver/nvidia/gpus/*/information 2>/dev/null); do
    make "nvidia$minor" 195 "$minor"
done
make nvidia-uvm "$major" 0
make nvidia-uvm-tools "$major" 1
"""


@dataclass(frozen=True, slots=True)
class Installation:
    """Where and what: paths are as seen inside the driver root."""

    version: str
    architecture: str
    library_dir: str
    binary_dir: str
    firmware_dir: str
    layout: str
    graphics: bool


def installation(layout: str, *, version: str, architecture: str, graphics: bool) -> Installation:
    """Give the places of one layout."""
    multiarch = f"/usr/lib/{architecture}-linux-gnu"
    libraries = {
        "cos": "/lib64", "ldcache": "/opt/nvidia/lib64", "debian-current": f"{multiarch}/nvidia/current",
        # The driver container of the operator is a RHEL image.
        "operator": "/usr/lib64",
    }.get(layout, multiarch)  # fmt: skip
    binaries = "/bin" if layout == "cos" else "/usr/bin"
    firmware = "/firmware" if layout == "cos" else "/usr/lib/firmware"
    return Installation(version, architecture, libraries, binaries, firmware, layout, graphics)


def write_driver_files(driver_root: Path, what: Installation) -> None:
    """Install a driver under `driver_root`."""
    if what.layout != "cos":
        _write_merged_usr(driver_root)
    _write_libraries(driver_root, what)
    for program in _PROGRAMS:
        text = stand_in(program) if program in STAND_INS else "#!/bin/sh\nexit 0\n"
        write_text(under(driver_root, f"{what.binary_dir}/{program}"), text, mode=0o755)
    write_text(under(driver_root, f"{what.binary_dir}/nvidia-modprobe"), _MODPROBE, mode=0o755)
    for firmware in ("gsp_ga10x.bin", "gsp_tu10x.bin"):
        write_bytes(
            under(driver_root, f"{what.firmware_dir}/nvidia/{what.version}/{firmware}"), b"\x7fELF simulated"
        )
    write_text(under(driver_root, "/etc/OpenCL/vendors/nvidia.icd"), "libnvidia-opencl.so.1\n")
    if what.graphics:
        for path in _GRAPHICS_FILES:
            write_text(under(driver_root, path), "{}\n")


def write_sockets(run_root: Path, *, fabric_manager: bool) -> None:
    """Leave the sockets of the driver's daemons under `<run_root>/run`."""
    make_socket(run_root / "run/nvidia-persistenced/socket")
    if fabric_manager:
        make_socket(run_root / "run/nvidia-fabricmanager/socket")


def remove_driver_files(driver_root: Path, what: Installation) -> None:
    """Take an installation's versioned files and links away, as a package removal does."""
    directory = under(driver_root, what.library_dir)
    for folder in (directory, directory / "vdpau", directory / "nvidia/xorg"):
        for path in folder.glob("*.so*") if folder.is_dir() else ():
            target = str(path.readlink()) if path.is_symlink() else path.name
            if what.version in target or (path.is_symlink() and not path.exists()):
                path.unlink()
    # A second round takes the links whose targets went in the first.
    for folder in (directory, directory / "vdpau"):
        for path in folder.glob("*.so*") if folder.is_dir() else ():
            if path.is_symlink() and not path.exists():
                path.unlink()
    firmware = under(driver_root, f"{what.firmware_dir}/nvidia/{what.version}")
    for path in firmware.glob("*.bin"):
        path.unlink()


def _write_merged_usr(driver_root: Path) -> None:
    for directory in ("usr/bin", "usr/sbin", "usr/lib", "usr/lib64"):
        (driver_root / directory).mkdir(parents=True, exist_ok=True)
    for name in ("bin", "sbin", "lib", "lib64"):
        if not (driver_root / name).exists():
            make_link(driver_root / name, f"usr/{name}")


def _write_libraries(driver_root: Path, what: Installation) -> None:
    libraries = dict(_COMPUTE) | (dict(_GRAPHICS) if what.graphics else {})
    entries: list[tuple[str, str]] = []
    for name, suffix in libraries.items():
        soname = _write_library(driver_root, what, name, suffix, version=what.version)
        entries.append(
            (soname, f"{what.library_dir}/{soname}" if "/" not in name else f"{what.library_dir}/{name}")
        )
    if what.graphics:
        for name, (suffix, version) in _OWN_VERSION.items():
            _write_library(driver_root, what, name, suffix, version=version)
        xorg = f"{what.library_dir}/nvidia/xorg"
        write_bytes(under(driver_root, f"{xorg}/nvidia_drv.so"), _library(what, "nvidia_drv.so"), mode=0o755)
    if what.layout == "ldcache":
        write_text(driver_root / "etc/ld.so.conf", f"{what.library_dir}\n")
    if what.layout in ("ldcache", "operator"):
        cache = ld_so_cache(
            [entry for entry in entries if "/vdpau" not in entry[1]], architecture=what.architecture
        )
        write_bytes(driver_root / "etc/ld.so.cache", cache)
    if what.layout == "debian-current":
        _write_alternatives(driver_root, what)


def _write_library(driver_root: Path, what: Installation, name: str, suffix: str, *, version: str) -> str:
    """Write one library with its links; gives its SONAME."""
    base = name.rpartition("/")[2]
    file = f"{base}.so.{version}"
    soname = f"{base}.so.{suffix}" if suffix else file
    directory = under(driver_root, f"{what.library_dir}/{name}").parent
    write_bytes(directory / file, _library(what, soname), mode=0o755)
    if suffix:
        make_link(directory / soname, file)
        if name in _BARE_LINKS or name in _OWN_VERSION:
            make_link(directory / f"{base}.so", soname)
    return soname


def _library(what: Installation, soname: str) -> bytes:
    return elf.shared_object(soname, architecture=what.architecture)


def _write_alternatives(driver_root: Path, what: Installation) -> None:
    """Link as Debian does: multiarch directory -> /etc/alternatives -> nvidia/current, with absolute targets."""
    multiarch = what.library_dir.removesuffix("/nvidia/current")
    for soname in ("libcuda.so.1", "libnvidia-ml.so.1", "libnvidia-ptxjitcompiler.so.1"):
        alternative = f"/etc/alternatives/nvidia--{soname}-{what.architecture}-linux-gnu"
        make_link(under(driver_root, alternative), f"{what.library_dir}/{soname}")
        make_link(under(driver_root, f"{multiarch}/{soname}"), alternative)
