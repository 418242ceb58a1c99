"""How the holders of a device share it: time-slices, compute modes, MPS daemons, as effects of the journal."""
