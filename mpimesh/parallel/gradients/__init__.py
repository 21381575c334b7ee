"""Flat gradients of replicas: buckets, their sums, their parts, and how they are cut."""
