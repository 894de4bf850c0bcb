"""The one exception tree of ragkv.

Every message is one line: what was wrong, the value, what is allowed, what to do.
"""


class RagkvError(Exception):
    """Base of every error that ragkv raises on purpose."""


class ConfigError(RagkvError, ValueError):
    """A recipe, an option, a prompt layout or a document cannot be used as given."""


class UnsupportedModelError(RagkvError):
    """The architecture, or its position encoding, cannot be archived exactly."""


class ModelMismatchError(RagkvError):
    """An archive was built with another model, tokenizer or configuration."""


class MissingExtraError(RagkvError, ImportError):
    """An optional dependency is not installed; the message names the extra."""


class ArchiveNotFoundError(RagkvError, FileNotFoundError):
    """There is no archive in the folder that was named."""


class ArchiveFormatError(RagkvError):
    """The files are not a version of the archive format that this release reads."""


class ArchiveCorruptError(RagkvError):
    """A checksum or an invariant of an archive does not hold."""


class ArchiveReadError(RagkvError, OSError):
    """The system did not let an archive be read just now: an I/O error, a permission, no descriptors or no memory.

    It says nothing about the archive, which may be sound: nothing is built again or deleted because of it.
    """


class NonFiniteError(RagkvError, ValueError):
    """A key or value is NaN, infinite or too large; the message names layer, head and token."""
