"""Support for `torch.compile`: recorded steps run eagerly, or as a variant with observers."""
