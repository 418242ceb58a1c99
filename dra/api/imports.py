"""Taking turns with imports that another room hides for a moment."""

from __future__ import annotations

import threading

# Held by whoever imports pydantic, and by whoever puts something else in its place while it imports a package that
# asks for pydantic and does not need it.
PYDANTIC = threading.RLock()
