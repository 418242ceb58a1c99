"""What a container would see of a CDI spec: nodes, files, links, environment, and which library a name leads to.

Small on purpose, and apart from the simulated runtime: it judges specs of ours and of the reference generator alike.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from posixpath import dirname, join, normpath

from dra.host.elf import read_elf
from dra.host.rooted import resolve

# What the loader of an image searches by default, beside its cache.
LOADER_DIRS = {
    "debian": ("/lib/x86_64-linux-gnu", "/usr/lib/x86_64-linux-gnu", "/lib", "/usr/lib"),
    "redhat": ("/lib64", "/usr/lib64", "/lib", "/usr/lib"),
}


@dataclass
class Container:
    """The result. `files` maps a path in the container to the host's real file, `links` a link to its target."""

    nodes: dict[str, tuple] = field(default_factory=dict)
    files: dict[str, Path] = field(default_factory=dict)
    options: dict[str, tuple] = field(default_factory=dict)
    links: dict[str, str] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)
    cache_dirs: list[str] = field(default_factory=list)
    hooks: list[tuple[str, ...]] = field(default_factory=list)

    def open(self, path: str) -> Path | None:
        """Give the host file behind a path of the container."""
        for _ in range(10):
            if path in self.files:
                return self.files[path]
            if path not in self.links:
                return None
            path = normpath(join(dirname(path), self.links[path]))
        return None

    def load(self, name: str, image: str = "debian") -> Path | None:
        """Give what dlopen(name) would map: LD_LIBRARY_PATH, then ldconfig's cache, then the image's directories."""
        searched = [entry for entry in self.env.get("LD_LIBRARY_PATH", "").split(":") if entry]
        for directory in (*searched, *self.cache_dirs, *LOADER_DIRS[image]):
            found = self.open(f"{directory}/{name}")
            if found is not None:
                return found
            if directory not in self.cache_dirs:
                continue
            # ldconfig also makes a link for each SONAME of the directories it is given.
            for path, file in self.files.items():
                facts = read_elf(str(file)) if dirname(path) == directory else None
                if facts is not None and facts.soname == name:
                    return file
        return None


def start(spec: dict, names: list[str], host: Path) -> Container:
    """Apply a spec's edits for some of its devices, as an engine does, on a host whose `/` is at `host`."""
    devices = {device["name"]: device for device in spec["devices"]}
    seen = Container()
    for edits in (spec.get("containerEdits") or {}, *(devices[name]["containerEdits"] for name in names)):
        for entry in edits.get("env", []):
            key, _, value = entry.partition("=")
            seen.env[key] = value
        for node in edits.get("deviceNodes", []):
            seen.nodes[node["path"]] = (
                node.get("type", "c"), node["major"], node.get("minor", 0), node["fileMode"], node.get("gid", 0)
            )  # fmt: skip
        for mount in edits.get("mounts", []):
            real = resolve(host, mount["hostPath"])
            assert real is not None, f"the engine fails: no {mount['hostPath']} on the host"
            seen.files[mount["containerPath"]] = real
            seen.options[mount["containerPath"]] = tuple(mount["options"])
        for hook in edits.get("hooks", []):
            _run(hook, seen, host)
    return seen


def _run(hook: dict, seen: Container, host: Path) -> None:
    assert resolve(host, hook["path"]) is not None, f"the engine fails: no {hook['path']} on the host"
    assert hook.get("env"), "the hook would inherit the image's environment"
    command, *args = hook["args"][1:]
    seen.hooks.append((command, *args))
    values = [value for flag, value in zip(args, args[1:], strict=False) if flag in ("--link", "--folder")]
    if command == "create-symlinks":
        seen.links |= {link: target for target, _, link in (value.partition("::") for value in values)}
    elif command == "update-ldcache":
        seen.cache_dirs += values
