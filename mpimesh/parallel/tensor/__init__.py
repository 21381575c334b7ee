"""Layers split over the ranks of a group, and activations split along the sequence."""
