"""What belongs to an NVIDIA driver, by name: libraries, programs and files, each with the capabilities that need it.

Data only. The capabilities are those of NVIDIA_DRIVER_CAPABILITIES (compute, utility, video, graphics, ngx, display);
the names follow NVIDIA's driver packages up to 590.
"""

from __future__ import annotations

COMPUTE, UTILITY, VIDEO, GRAPHICS, NGX, DISPLAY = "compute", "utility", "video", "graphics", "ngx", "display"
CAPABILITIES = frozenset({COMPUTE, UTILITY, VIDEO, GRAPHICS, NGX, DISPLAY})
# As NVIDIA's DRA driver: everything but what only an X server needs.
DEFAULT_CAPABILITIES = CAPABILITIES - {DISPLAY}

# Where libraries are looked for, in order; distinct directories behind them count once.
LIBRARY_DIRS = (
    "/",
    "/usr/lib64",
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/usr/lib64/nvidia/current",
    "/usr/lib/x86_64-linux-gnu/nvidia/current",
    "/usr/lib/aarch64-linux-gnu/nvidia/current",
    "/lib64",
    "/lib/x86_64-linux-gnu",
    "/lib/aarch64-linux-gnu",
    "/lib64/nvidia/current",
    "/lib/x86_64-linux-gnu/nvidia/current",
    "/lib/aarch64-linux-gnu/nvidia/current",
)
# Only if nothing is above: distributions without multiarch or lib64 (32-bit libraries stand here on others).
PLAIN_LIBRARY_DIRS = ("/usr/lib", "/lib")
BINARY_DIRS = ("/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin")
SHARE_DIRS = ("/etc", "/usr/local/share", "/usr/share")
# Where Google's driver installer for COS puts firmware, below the driver root; a program looks in /lib/firmware.
COS_FIRMWARE_DIR = "/firmware"
RUN_DIRS = ("/run", "/var/run")
XORG_DIRS = (
    "nvidia/xorg",  # below each library directory
    "/usr/lib/xorg/modules/drivers",
    "/usr/lib/xorg/modules/extensions",
    "/usr/lib64/xorg/modules/drivers",
    "/usr/lib64/xorg/modules/extensions",
    "/usr/lib64/xorg/modules",
)

_C, _CG = frozenset({COMPUTE}), frozenset({COMPUTE, GRAPHICS})
_G, _V, _U = frozenset({GRAPHICS}), frozenset({VIDEO}), frozenset({UTILITY})

# Library (without lib in front and .so behind) -> capabilities. One that is not here is needed by all: a new driver
# may have split one of these.
LIBRARY_CAPABILITIES: dict[str, frozenset[str]] = {
    # NCCL and other CUDA programs ask NVML, so compute needs it too.
    "nvidia-ml": frozenset({UTILITY, COMPUTE}),
    "nvidia-cfg": _U,
    "nvidia-nscq": _U,
    "cuda": frozenset({COMPUTE, VIDEO, GRAPHICS}),
    "cudadebugger": _C,
    "nvidia-opencl": _C,
    "nvidia-gpucomp": _CG,
    "nvidia-ptxjitcompiler": _CG,
    "nvidia-fatbinaryloader": _C,
    "nvidia-allocator": _CG,
    "nvidia-compiler": _C,
    "nvidia-pkcs11": _C,
    "nvidia-pkcs11-openssl3": _C,
    "nvidia-nvvm": _C,
    "nvidia-nvvm70": _C,
    "nvidia-tileiras": _C,
    "nvidia-sandboxutils": _C,
    "nvsdm": _C,
    "vdpau_nvidia": _V,
    "nvidia-encode": _V,
    "nvidia-opticalflow": _V,
    "nvcuvid": _V,
    "nvidia-eglcore": _G,
    "nvidia-glcore": _G,
    "nvidia-tls": _G,
    "nvidia-glsi": _G,
    "nvidia-fbc": _G,
    "nvidia-ifr": _G,
    "nvidia-rtcore": _G,
    "nvoptix": _G,
    "nvidia-glvkspirv": _G,
    "nvidia-cbl": _G,
    "nvidia-vulkan-producer": _G,
    "nvidia-present": _G,
    "nvidia-vksc-core": _G,
    "nvidia-wayland-client": _G,
    "nvidia-gtk2": _G,
    "nvidia-gtk3": _G,
    "GLX_nvidia": _G,
    "EGL_nvidia": _G,
    "GLESv2_nvidia": _G,
    "GLESv1_CM_nvidia": _G,
    "nvidia-egl-gbm": _G,
    "nvidia-egl-wayland": _G,
    "nvidia-egl-wayland2": _G,
    "nvidia-egl-xcb": _G,
    "nvidia-egl-xlib": _G,
    "nvidia-ngx": frozenset({NGX}),
    "glxserver_nvidia": frozenset({DISPLAY}),
}

# Names a container needs whether the host has such a link or not. Source: what CUDA programs and GLVND open by name.
ALWAYS_NAMED: dict[str, tuple[str, ...]] = {
    "cuda": ("libcuda.so.1", "libcuda.so"),
    "nvidia-opticalflow": ("libnvidia-opticalflow.so.1", "libnvidia-opticalflow.so"),
    "GLX_nvidia": ("libGLX_indirect.so.0",),
}

BINARIES: dict[str, frozenset[str]] = {
    "nvidia-smi": _U,
    "nvidia-debugdump": _U,
    "nvidia-persistenced": _U,
    "nvidia-cuda-mps-control": _C,
    "nvidia-cuda-mps-server": _C,
    "nvidia-imex": _U,
    "nvidia-imex-ctl": _U,
    "nvidia-xconfig": frozenset({UTILITY, DISPLAY}),
}
SOCKETS = ("nvidia-persistenced/socket", "nvidia-fabricmanager/socket")

# (directories looked in, file or pattern below them, directory in the container (empty: where it was found), capabilities).
CONFIG_FILES: tuple[tuple[tuple[str, ...], str, str, frozenset[str]], ...] = (
    (("/etc",), "OpenCL/vendors/nvidia.icd", "", _C),
    # `/vulkan` is where Google's driver installer for COS puts them.
    ((*SHARE_DIRS, "/"), "vulkan/icd.d/nvidia_icd*.json", "/etc", _G),
    ((*SHARE_DIRS, "/"), "vulkan/icd.d/nvidia_layers.json", "/etc", _G),
    ((*SHARE_DIRS, "/"), "vulkan/implicit_layer.d/nvidia_layers.json", "/etc", _G),
    (SHARE_DIRS, "glvnd/egl_vendor.d/10_nvidia.json", "/usr/share", _G),
    (SHARE_DIRS, "egl/egl_external_platform.d/*nvidia*.json", "/usr/share", _G),
    (SHARE_DIRS, "nvidia/nvoptix.bin", "/usr/share", _G),
    (SHARE_DIRS, "X11/xorg.conf.d/10-nvidia.conf", "/usr/share", frozenset({DISPLAY})),
    (SHARE_DIRS, "X11/xorg.conf.d/nvidia-drm-outputclass.conf", "/usr/share", frozenset({DISPLAY})),
)
