"""Inventory and taints to devices, counters and pools of ResourceSlices. Pure."""
