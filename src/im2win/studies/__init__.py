"""Measurements that repeat the source papers' comparisons (docs/papers.md), and ablations: one study in each module."""
