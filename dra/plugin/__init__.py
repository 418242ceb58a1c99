"""The kubelet's side: sockets, registration, DRA services, probe, and the daemon's wiring."""
