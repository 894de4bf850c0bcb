"""Data: documents and questions from files on disk, or made from a document itself."""
