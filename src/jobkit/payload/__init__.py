"""What runs on the compute nodes: torch, torchvision and the standard library only."""
