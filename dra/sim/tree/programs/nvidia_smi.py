"""nvidia-smi of a simulated node: `-L`, `-pm` and `compute-policy`, on the state that the simulated NVML has.

Return codes and texts as nvidia-smi(1) has them. A fault set for the function `nvidia-smi compute-policy` makes it fail
(with NVML's number), be slow or hang.
"""

import fcntl
import fnmatch
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

INVALID, NOT_SUPPORTED, NOT_FOUND, NO_DRIVER, LOST = 2, 3, 6, 9, 15
_FUNCTION = "nvidia-smi compute-policy"
Json = dict[str, Any]
_INTERVALS = ("Default", "Short", "Medium", "Long")


def sim_folder() -> Path:
    """Give the folder with the node's state: in one of the directories above this program."""
    for parent in Path(__file__).resolve().parents:
        if (parent / "sim/state.json").is_file():
            return parent / "sim"
    print("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.")
    sys.exit(NO_DRIVER)


class State:
    """The node's state file, changed under its lock. Source: dra.sim.nvml.state.StateStore."""

    def __init__(self, folder: Path) -> None:
        self._path, self._lock_path = folder / "state.json", folder / "state.lock"

    def read(self) -> Json:
        """Give the state."""
        return dict(json.loads(self._path.read_text()))

    def change(self, change: Callable[[Json], Any]) -> Any:
        """Change it; what `change` gives."""
        with self._lock_path.open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            state = self.read()
            result = change(state)
            temporary = self._path.with_suffix(".new")
            temporary.write_text(json.dumps(state, separators=(",", ":")))
            temporary.replace(self._path)
            return result


def seen(gpu: Json) -> bool:
    """Whether NVIDIA's driver has a GPU."""
    return bool(gpu["present"]) and gpu.get("pci_driver", "nvidia") == "nvidia"


def suffer(state: State, uuid: str) -> int:
    """Let a fault act; give its number, 0 for none."""

    def use_up(content: Json) -> Json | None:
        for fault in content.get("faults", []):
            if (
                fault["times"] != 0
                and fault["gpu"] in ("", uuid)
                and fnmatch.fnmatchcase(_FUNCTION, fault["function"])
            ):
                if fault["times"] > 0:
                    fault["times"] -= 1
                return dict(fault)
        return None

    fault = state.change(use_up)
    if fault is None:
        return 0
    end = None if fault["hang"] else time.monotonic() + fault["delay_seconds"]
    while end is None or time.monotonic() < end:
        if all(other["number"] != fault["number"] for other in state.read().get("faults", [])):
            break
        time.sleep(0.05)
    return int(fault["error"])


def compute_policy(state: State, words: list[str]) -> int:
    """Set the time-slice of one GPU, or of all."""
    options = dict(zip(words[::2], words[1::2], strict=False))
    wanted, uuid = options.get("--set-timeslice"), options.get("-i", "")
    if wanted not in ("0", "1", "2", "3"):
        print(f"Invalid time-slice {wanted!r}. Values: 0 default, 1 short, 2 medium, 3 long.")
        return INVALID
    content = state.read()
    if not content["module_version"]:
        print("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.")
        return NO_DRIVER
    chosen = [gpu["uuid"] for gpu in content["gpus"] if seen(gpu) and uuid in ("", gpu["uuid"])]
    if not chosen:
        print(f"No devices were found: {uuid}")
        return NOT_FOUND
    for gpu in chosen:
        error = suffer(state, gpu)
        if error:
            print(
                f"Unable to set time-slice for GPU {gpu}: {'Not Supported' if error == NOT_SUPPORTED else error}"
            )
            return error
        if next(each for each in content["gpus"] if each["uuid"] == gpu)["lost"]:
            print(f"Unable to set time-slice for GPU {gpu}: GPU is lost")
            return LOST

    def set_all(content: Json) -> None:
        for gpu in content["gpus"]:
            if gpu["uuid"] in chosen:
                gpu["timeslice"] = int(wanted)

    state.change(set_all)
    for gpu in chosen:
        print(f"Set time-slice to {_INTERVALS[int(wanted)]} for GPU {gpu}")
    return 0


def persistence_mode(state: State, folder: Path, words: list[str]) -> int:
    """Set the persistence mode of one GPU, by its PCI address or UUID."""
    options = dict(zip(words[::2], words[1::2], strict=False))
    name, wanted = options.get("-i", ""), options.get("-pm")
    if wanted not in ("0", "1"):
        print(f"Invalid persistence mode {wanted!r}")
        return INVALID
    information = folder.parent / "proc/driver/nvidia/gpus" / name / "information"
    if information.is_file():
        lines = (line.partition(":") for line in information.read_text().splitlines())
        name = next((value.strip() for key, _, value in lines if key == "GPU UUID"), name)

    def set_one(content: Json) -> int:
        for gpu in content["gpus"]:
            if seen(gpu) and gpu["uuid"] == name:
                gpu["persistence"] = wanted == "1"
                return 0
        print(f"No devices were found: {name}")
        return NOT_FOUND

    return int(state.change(set_one))


def main(words: list[str]) -> int:
    """Play the program."""
    folder = sim_folder()
    state = State(folder)
    if words[:1] == ["compute-policy"]:
        return compute_policy(state, words[1:])
    if "-pm" in words:
        return persistence_mode(state, folder, words)
    if words[:1] == ["-L"]:
        present = [gpu["uuid"] for gpu in state.read()["gpus"] if seen(gpu)]
        for index, uuid in enumerate(present):
            print(f"GPU {index}: NVIDIA GPU (UUID: {uuid})")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
