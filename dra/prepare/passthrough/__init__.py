"""GPUs that are given to virtual machines: claims of `gpu-vfio-<index>`, whose PCI functions change their kernel driver."""
