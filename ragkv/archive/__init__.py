"""The archive format in code, one module a chapter of FORMAT.md; runs no model."""
