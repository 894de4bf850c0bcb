"""Offline: a document's keys and values become clusters, codes and files."""
