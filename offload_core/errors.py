"""The errors this package raises. Every message says what was got, what was expected and what to do."""


class OffloadError(Exception):
    """Base of all errors raised by offload-core."""


class ConfigError(OffloadError, ValueError):
    """A configuration field is unknown, out of range or contradicts another."""


class ConfigWarning(UserWarning):
    """Parts of a configuration have no effect here, or are slow on this processor or in this folder, or processes that
    were started together train alone."""


class ParameterError(OffloadError, ValueError):
    """A parameter cannot be offloaded, or its size, type, device or memory order has changed since it was wrapped."""


class GradientError(OffloadError, ValueError):
    """A gradient does not fit its parameter, or would be lost."""


class StateError(OffloadError, RuntimeError):
    """An operation came at a moment at which it is not allowed."""


class HostMemoryError(OffloadError, MemoryError):
    """The host memory asked for is not available."""


class HostMemoryWarning(UserWarning):
    """Host memory is not pinned, so that a device's copies are slower, or more of it is taken than was planned."""


class DeviceMemoryError(OffloadError, MemoryError):
    """The device memory asked for is not available."""


class DiskError(OffloadError, RuntimeError):
    """A scratch file cannot be made, written or read."""


class DiskSpaceError(DiskError):
    """The disk space asked for is not available."""


class CollectiveError(OffloadError, RuntimeError):
    """A collective operation failed: a rank was lost, timed out, or differs from the others."""

    @classmethod
    def of(cls, rank: int, what: str, error: BaseException, others: str = "") -> "CollectiveError":
        """The error for a user, from a backend's error.

        Args:
            others: what other ranks are known to have failed in.
        """
        return cls(
            f"rank {rank}: {what} failed ({error}){others and f'; {others}'}; a rank was lost, did not come in the "
            "group's time, or made another number of backwards or steps (in stage 3: ran other modules or lacked a "
            "gradient; leaf_modules names modules in which ranks may differ): end this run and resume from the last "
            "checkpoint"
        )


class CheckpointError(OffloadError, RuntimeError):
    """A checkpoint cannot be written, is incomplete, or does not fit the model that loads it."""


class NewerCheckpointError(CheckpointError):
    """A checkpoint has a version of the format that this offload-core does not read. It is not damaged."""


class CheckpointWarning(UserWarning):
    """A checkpoint that was being written while training went on has failed."""


class KernelError(OffloadError, RuntimeError):
    """The C library refused a call."""
